//! The ends of answers and requests, and of steps that fail.

use super::advance::End;
use super::request::{Event, Happened, RequestId};
use super::task::Task;
use super::{Flight, Service};
use crate::error::EngineError;

impl Service {
    /// Ends an answer, and the request with its last one or with one that failed.
    pub(super) fn end(&mut self, id: RequestId, choice: usize, end: End, events: &mut Vec<Event>) {
        let Some(ticket) = self.tickets.get_mut(&id) else { return };
        match end {
            End::Failed(why) => {
                self.cancel(id);
                events.push(Event { id, what: Happened::Failed(why) });
            }
            End::Stuck(why) => {
                self.cancel(id);
                events.push(Event { id, what: Happened::Stuck(why) });
            }
            End::Finished(finish, stop_token) => {
                events.push(Event { id, what: Happened::Ended { choice, finish, stop_token } });
                ticket.open -= 1;
                let (usage, open) = (ticket.usage, ticket.open);
                // Where the first answer ends before its prompt has run, the others run it.
                for follower in std::mem::take(&mut ticket.followers) {
                    self.scheduler.add(follower);
                }
                self.scheduler.remove(&mut self.engine, |task| (task.id, task.choice) == (id, choice));
                if open == 0 {
                    self.tickets.remove(&id);
                    events.push(Event { id, what: Happened::Done(usage) });
                }
            }
        }
    }

    /// Ends the requests of the first step in flight, which failed, and takes the rows of those behind it back.
    pub(super) fn fail_flights(&mut self, error: &EngineError, events: &mut Vec<Event>) {
        let failed = self.flights.pop_front().unwrap_or_default();
        self.flights.clear();
        for task in &mut self.scheduler.running {
            task.flying = 0;
            task.candidates.clear();
        }
        self.fail_rows(&failed, error, events);
    }

    /// Ends the requests of a step that failed.
    pub(super) fn fail_rows(&mut self, failed: &Flight, error: &EngineError, events: &mut Vec<Event>) {
        self.stats.failed_steps += 1;
        let why = error.to_string();
        let met = |task: &&Task| task.sequence.is_some_and(|id| failed.rows.contains(&id));
        let mut ids: Vec<RequestId> = self.scheduler.running.iter().filter(met).map(|task| task.id).collect();
        ids.dedup();
        ids.into_iter().for_each(|id| self.end(id, 0, End::Failed(why.clone()), events));
    }
}
