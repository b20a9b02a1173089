//! A pipeline run: by fixed orders of passes, or by rules where no order is fixed.

use super::schedule::Schedule;
use super::stages::Pipeline;
use super::timeline::Timeline;
use super::{greedy, in_order, orders};
use crate::error::PlanError;

impl Pipeline {
    /// Runs it.
    ///
    /// # Errors
    /// Those of [`Pipeline::check`].
    pub fn simulate(&self) -> Result<Timeline, PlanError> {
        self.check()?;
        let events = match self.schedule {
            Schedule::GPipe | Schedule::OneFOneB | Schedule::Interleaved | Schedule::DualPipe => {
                in_order::in_order(self, &orders::orders(self))
            }
            Schedule::ZeroBubbleH1 | Schedule::ZeroBubbleV => greedy::best(self),
        };
        Ok(Timeline::new(self, events))
    }
}
