//! The report of a run.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::driver::{LoadRun, RequestOutcome};
use super::stats::quantile;
use super::{SampleSummary, ServerUsage, TimedResponse};

/// Latency limits in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Objective {
    /// To the first token at most.
    pub ttft: Option<f64>,
    /// A token after the first at most.
    pub tpot: Option<f64>,
    /// To the end at most.
    pub e2e: Option<f64>,
}

impl Objective {
    /// Reads `ttft=200ms,tpot=50ms,e2e=2s`.
    ///
    /// # Errors
    /// Says what must stand there.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut objective = Self::default();
        for part in text.split(',') {
            let (name, limit) = part.split_once('=').ok_or("must have the form ttft=200ms,tpot=50ms,e2e=2s")?;
            let limit = limit.trim();
            let (number, unit) = match limit.strip_suffix("ms") {
                Some(number) => (number, 1e-3),
                None => (limit.strip_suffix('s').ok_or_else(|| format!("{limit:?} must end in ms or s"))?, 1.0),
            };
            let number = number.parse::<f64>().ok().filter(|n| *n > 0.0 && n.is_finite());
            let seconds = number.ok_or_else(|| format!("{limit:?} is not a time above 0"))? * unit;
            let place = match name.trim() {
                "ttft" => &mut objective.ttft,
                "tpot" => &mut objective.tpot,
                "e2e" => &mut objective.e2e,
                other => return Err(format!("{other:?} is not one of ttft, tpot, e2e")),
            };
            if place.replace(seconds).is_some() {
                return Err(format!("repeats {}", name.trim()));
            }
        }
        Ok(objective)
    }

    /// Does the answer keep it?
    pub fn kept_by(&self, answer: &TimedResponse) -> bool {
        let within = |limit: Option<f64>, is: Option<f64>| limit.zip(is).is_none_or(|(limit, is)| is <= limit);
        within(self.ttft, Some(answer.ttft)) && within(self.tpot, answer.tpot()) && within(self.e2e, Some(answer.e2e))
    }

    /// By name what the `share` of the answers with the lowest values have at most of each time that it limits, in seconds.
    pub fn attained(&self, run: &LoadRun, share: f64) -> Vec<(&'static str, Option<f64>)> {
        let at = |name: &str| {
            let value = |answer: &TimedResponse| match name {
                "ttft" => Some(answer.ttft),
                "tpot" => answer.tpot(),
                _ => Some(answer.e2e),
            };
            let mut values: Vec<f64> = run.outcomes.iter().filter_map(|o| value(o.answer.as_ref().ok()?)).collect();
            values.sort_by(f64::total_cmp);
            (!values.is_empty()).then(|| quantile(&values, share))
        };
        self.limits().map(|(name, _)| (name, at(name))).collect()
    }

    /// Its limits by name, in seconds.
    pub fn limits(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let all = [("ttft", self.ttft), ("tpot", self.tpot), ("e2e", self.e2e)];
        all.into_iter().filter_map(|(name, limit)| limit.map(|l| (name, l)))
    }
}

/// The results of a run. Failed requests are counted and excluded from all other figures.
#[derive(Clone, Debug)]
pub struct LoadReport {
    /// Requests sent.
    pub requests: usize,
    /// Those answered.
    pub answered: usize,
    /// How many failed by kind, with what one of each said.
    pub failures: BTreeMap<String, (usize, String)>,
    /// From the first request to the last end.
    pub seconds: f64,
    /// Requests a second that were sent.
    pub offered: f64,
    /// Tokens of the prompts of answered requests, where the server counts them.
    pub prompt_tokens: Option<usize>,
    /// Tokens of answers.
    pub output_tokens: usize,
    /// Did the server count the tokens of every answer? Else events were counted for some.
    pub counted: bool,
    /// Answers that have fewer tokens than were asked for.
    pub short: usize,
    /// Most requests at a time.
    pub peak: usize,
    /// Seconds to the first token.
    pub ttft: Option<SampleSummary>,
    /// Seconds a token after the first, by answer.
    pub tpot: Option<SampleSummary>,
    /// Seconds between events with tokens, of all answers.
    pub itl: Option<SampleSummary>,
    /// Seconds to the end.
    pub e2e: Option<SampleSummary>,
    /// Seconds by which requests were sent after their times: how well the load was made.
    pub late: Option<SampleSummary>,
    /// How many answers keep the objective, if there is one.
    pub good: Option<usize>,
    /// Whether answers kept up with requests.
    pub steadiness: Steadiness,
    /// What the run took of the server, if that tells.
    pub server: Option<ServerUsage>,
}

/// Whether answers kept up with requests, in the second half of the time in which requests were sent: by then a server
/// that cannot has requests that wait, more and more of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Steadiness {
    /// Requests sent in that time.
    pub sent: usize,
    /// Requests that ended in it, whenever they were sent; failures do not count.
    pub answered: usize,
    /// Requests under way when it began.
    pub under_way: usize,
}

impl Steadiness {
    /// The share of the load that must be answered.
    const SHARE: f64 = 0.95;

    fn of(outcomes: &[RequestOutcome]) -> Self {
        let (Some(first), Some(last)) = (outcomes.first(), outcomes.last()) else { return Self::default() };
        let (middle, end) = (f64::midpoint(first.sent, last.sent), last.sent);
        let count = |of: &dyn Fn(&RequestOutcome) -> bool| outcomes.iter().filter(|o| of(o)).count();
        Self {
            sent: count(&|o| o.sent > middle),
            answered: count(&|o| o.answer.is_ok() && o.ended > middle && o.ended <= end),
            under_way: count(&|o| o.sent <= middle && o.ended > middle),
        }
    }

    /// Were 95 % of the requests answered, give or take what random times leave under way?
    pub fn is_kept(&self) -> bool {
        // The number of requests under way in a steady state varies as that of a Poisson process; two of its deviations.
        let leeway = 2.0 * (self.under_way as f64 + 1.0).sqrt();
        self.answered as f64 + leeway >= Self::SHARE * self.sent as f64
    }

    /// The share of the load that was answered, above 1 where it caught up.
    pub fn share(&self) -> f64 {
        self.answered as f64 / self.sent.max(1) as f64
    }
}

impl LoadReport {
    /// Of a run; `asked` says how many tokens the request of a number asked for.
    pub fn new(run: &LoadRun, asked: impl Fn(usize) -> usize, objective: Option<&Objective>) -> Self {
        let answers: Vec<(usize, &TimedResponse)> =
            run.outcomes.iter().filter_map(|o| Some((o.index, o.answer.as_ref().ok()?))).collect();
        let mut failures = BTreeMap::new();
        for failure in run.outcomes.iter().filter_map(|o| o.answer.as_ref().err()) {
            failures.entry(failure.kind.clone()).or_insert_with(|| (0, failure.message.clone())).0 += 1;
        }
        let of = |value: &dyn Fn(&TimedResponse) -> Option<f64>| {
            SampleSummary::of(answers.iter().filter_map(|(_, a)| value(a)).collect())
        };
        let sent = run.outcomes.last().map_or(0.0, |o| o.sent) - run.outcomes.first().map_or(0.0, |o| o.sent);
        Self {
            requests: run.outcomes.len(),
            answered: answers.len(),
            failures,
            seconds: run.seconds,
            offered: if sent > 0.0 { (run.outcomes.len() - 1) as f64 / sent } else { 0.0 },
            prompt_tokens: answers.iter().map(|(_, a)| a.prompt_tokens).sum(),
            output_tokens: answers.iter().map(|(_, a)| a.output_tokens).sum(),
            counted: answers.iter().all(|(_, a)| a.counted),
            short: answers.iter().filter(|(i, a)| a.output_tokens < asked(*i)).count(),
            peak: peak(&run.outcomes),
            ttft: of(&|a| Some(a.ttft)),
            tpot: of(&TimedResponse::tpot),
            itl: SampleSummary::of(answers.iter().flat_map(|(_, a)| a.itl.iter().copied()).collect()),
            e2e: of(&|a| Some(a.e2e)),
            late: SampleSummary::of(run.outcomes.iter().filter_map(|o| o.late).collect()),
            good: objective.map(|o| answers.iter().filter(|(_, a)| o.kept_by(a)).count()),
            steadiness: Steadiness::of(&run.outcomes),
            server: run.server,
        }
    }

    /// `n` a second.
    pub fn rate(&self, n: usize) -> f64 {
        if self.seconds > 0.0 { n as f64 / self.seconds } else { 0.0 }
    }

    /// The share of all requests whose answers are good; those that failed are not.
    pub fn good_share(&self) -> Option<f64> {
        self.good.map(|good| good as f64 / self.requests.max(1) as f64)
    }

    /// As JSON, times in seconds.
    pub fn object(&self) -> Value {
        let summary = |s: &Option<SampleSummary>| s.as_ref().map(SampleSummary::object);
        let failures: serde_json::Map<String, Value> = self
            .failures
            .iter()
            .map(|(kind, (count, said))| (kind.clone(), json!({ "count": count, "example": said })))
            .collect();
        json!({
            "requests": self.requests,
            "answered": self.answered,
            "failed": self.requests - self.answered,
            "failures": failures,
            "seconds": self.seconds,
            "peak_concurrency": self.peak,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "tokens_counted_by_server": self.counted,
            "short_answers": self.short,
            "offered_requests_per_second": self.offered,
            "requests_per_second": self.rate(self.answered),
            "output_tokens_per_second": self.rate(self.output_tokens),
            "tokens_per_second": self.prompt_tokens.map(|p| self.rate(p + self.output_tokens)),
            "answered_share_when_steady": self.steadiness.share(),
            "good": self.good,
            "good_share": self.good_share(),
            "goodput_requests_per_second": self.good.map(|good| self.rate(good)),
            "ttft_seconds": summary(&self.ttft),
            "tpot_seconds": summary(&self.tpot),
            "itl_seconds": summary(&self.itl),
            "e2e_seconds": summary(&self.e2e),
            "sent_late_seconds": summary(&self.late),
            "server": self.server.map(|server| server.object()),
        })
    }
}

/// Most requests at a time.
fn peak(outcomes: &[RequestOutcome]) -> usize {
    let mut ends: Vec<f64> = outcomes.iter().map(|o| o.ended).collect();
    ends.sort_by(f64::total_cmp);
    let (mut ended, mut peak) = (0, 0);
    for (begun, outcome) in outcomes.iter().enumerate() {
        while ends[ended] < outcome.sent {
            ended += 1;
        }
        peak = peak.max(begun + 1 - ended);
    }
    peak
}

#[cfg(test)]
mod tests {
    use super::super::RequestFailure;
    use super::*;

    fn answered(index: usize, sent: f64, ttft: f64, tokens: usize, tpot: f64) -> RequestOutcome {
        let last = ttft + tpot * (tokens - 1) as f64;
        let answer = TimedResponse {
            ttft,
            last,
            e2e: last,
            itl: vec![tpot; tokens - 1],
            prompt_tokens: Some(10),
            output_tokens: tokens,
            counted: true,
        };
        RequestOutcome { index, sent, late: Some(0.0), ended: sent + last, answer: Ok(answer) }
    }

    fn failed(index: usize, sent: f64, kind: &str) -> RequestOutcome {
        let answer = Err(RequestFailure { kind: kind.to_owned(), message: format!("{kind} {index}") });
        RequestOutcome { index, sent, late: Some(0.5), ended: sent + 100.0, answer }
    }

    #[test]
    fn failures_are_counted_by_kind_and_averaged_nowhere() {
        let outcomes = vec![
            answered(0, 0.0, 1.0, 5, 0.5),
            failed(1, 1.0, "http 429"),
            answered(2, 2.0, 3.0, 1, 0.0),
            failed(3, 3.0, "closed"),
            failed(4, 4.0, "http 429"),
        ];
        let run = LoadRun { outcomes, seconds: 10.0, server: None };
        let objective = Objective::parse("ttft=2s,tpot=600ms").unwrap();
        let report = LoadReport::new(&run, |i| if i == 2 { 4 } else { 5 }, Some(&objective));
        assert_eq!((report.requests, report.answered, report.short), (5, 2, 1));
        assert_eq!(report.failures["http 429"], (2, "http 429 1".to_owned()));
        assert_eq!(report.failures["closed"].0, 1);
        assert_eq!((report.ttft.unwrap().mean, report.ttft.unwrap().count), (2.0, 2));
        assert_eq!((report.tpot.unwrap().mean, report.tpot.unwrap().count), (0.5, 1));
        assert_eq!((report.itl.unwrap().count, report.e2e.unwrap().max), (4, 3.0));
        assert_eq!((report.prompt_tokens, report.output_tokens), (Some(20), 6));
        assert_eq!((report.good, report.good_share()), (Some(1), Some(0.2)));
        assert_eq!((report.rate(report.output_tokens), report.offered), (0.6, 1.0));
    }

    #[test]
    fn answers_that_fall_behind_are_no_steady_state() {
        // 100 requests a second for 10 s, each answered after 0.4 s.
        let steady: Vec<RequestOutcome> = (0..1000).map(|i| answered(i, i as f64 / 100.0, 0.4, 1, 0.0)).collect();
        let of = Steadiness::of(&steady);
        assert_eq!((of.sent, of.under_way), (500, 40));
        assert!(of.is_kept() && (0.95..1.05).contains(&of.share()), "{of:?}");
        // As many, of which 80 a second are answered.
        let slow =
            (0..1000).map(|i| answered(i, i as f64 / 100.0, 0.4 + i as f64 * (1.0 / 80.0 - 1.0 / 100.0), 1, 0.0));
        let of = Steadiness::of(&slow.collect::<Vec<_>>());
        assert!(!of.is_kept() && (0.7..0.85).contains(&of.share()), "{of:?}");
        assert!(!Steadiness::of(&(0..100).map(|i| failed(i, i as f64, "closed")).collect::<Vec<_>>()).is_kept());
        assert!(Steadiness::of(&[]).is_kept());
        let run = LoadRun { outcomes: steady, seconds: 10.0, server: None };
        let attained = Objective::parse("ttft=1s,tpot=1s").unwrap().attained(&run, 0.95);
        assert_eq!(attained, [("ttft", Some(0.4)), ("tpot", None)]);
    }

    #[test]
    fn the_peak_is_the_most_that_overlap() {
        let outcomes = [(0.0, 1.0), (0.5, 1.0), (1.4, 5.0), (1.45, 0.01), (1.6, 1.0)];
        let outcomes: Vec<RequestOutcome> =
            outcomes.iter().enumerate().map(|(i, (sent, long))| answered(i, *sent, *long, 1, 0.0)).collect();
        assert_eq!(peak(&outcomes), 3);
        assert_eq!(peak(&[]), 0);
    }

    #[test]
    fn objectives_are_read_and_mistakes_in_them_named() {
        let objective = Objective::parse("ttft=200ms, tpot=0.05s").unwrap();
        assert_eq!((objective.ttft, objective.tpot, objective.e2e), (Some(0.2), Some(0.05), None));
        for (text, said) in [
            ("", "must have the form"),
            ("ttft", "must have the form"),
            ("ttft=5", "end in ms or s"),
            ("ttft=-1s", "not a time above 0"),
            ("ttft=infs", "not a time above 0"),
            ("itl=1s", "not one of ttft"),
            ("e2e=1s,e2e=2s", "repeats e2e"),
        ] {
            assert!(Objective::parse(text).unwrap_err().contains(said), "{text}");
        }
    }
}
