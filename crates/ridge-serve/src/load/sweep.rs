//! The highest rate of requests at which a server keeps an objective.

/// What was tried.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SweepTrial {
    /// Requests a second.
    pub rate: f64,
    /// Was the objective kept?
    pub kept: bool,
}

/// What a search came to.
#[derive(Clone, Debug, PartialEq)]
pub struct RateSweep {
    /// The highest rate that kept it; `None` if even the lowest did not.
    pub highest: Option<f64>,
    /// The lowest rate above that did not; `None` if all did.
    pub lowest_broken: Option<f64>,
    /// All steps in their order.
    pub tried: Vec<SweepTrial>,
}

/// How far from the first rate one may go: some 1000 times.
const MAX_DOUBLINGS: usize = 10;

/// Doubles the rate, or halves it, until the objective stops or begins to be kept, then halves the ratio of the two rates
/// until they differ by less than `precision` (0.05: 5%). `keeps` tries a rate.
///
/// # Errors
/// The first of `keeps`.
pub fn sweep<E>(first: f64, precision: f64, mut keeps: impl FnMut(f64) -> Result<bool, E>) -> Result<RateSweep, E> {
    let mut tried = Vec::new();
    let mut at = |rate: f64| {
        let kept = keeps(rate)?;
        tried.push(SweepTrial { rate, kept });
        Ok(kept)
    };
    let (mut low, mut high) = (None, None);
    let mut rate = first;
    for _ in 0..=MAX_DOUBLINGS {
        if at(rate)? {
            low = Some(rate);
            if high.is_some() {
                break;
            }
            rate *= 2.0;
        } else {
            high = Some(rate);
            if low.is_some() {
                break;
            }
            rate /= 2.0;
        }
    }
    while let (Some(kept), Some(broken)) = (low, high)
        && broken / kept > 1.0 + precision
    {
        let middle = (kept * broken).sqrt();
        if at(middle)? {
            low = Some(middle);
        } else {
            high = Some(middle);
        }
    }
    Ok(RateSweep { highest: low, lowest_broken: high, tried })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_found_from_below_and_from_above() {
        for limit in [0.07, 1.0, 3.7, 12.0, 600.0] {
            let found = sweep(1.0, 0.05, |rate| Ok::<_, ()>(rate <= limit)).unwrap();
            let highest = found.highest.unwrap();
            assert!(highest <= limit && limit < found.lowest_broken.unwrap(), "{limit}: {found:?}");
            assert!(found.lowest_broken.unwrap() / highest <= 1.05);
            assert!(found.tried.len() < 20);
            assert!(found.tried.iter().all(|t| t.kept == (t.rate <= limit)));
        }
    }

    #[test]
    fn a_server_that_always_keeps_it_or_never_is_told_as_such() {
        let always = sweep(2.0, 0.05, |_| Ok::<_, ()>(true)).unwrap();
        assert_eq!((always.highest, always.lowest_broken, always.tried.len()), (Some(2048.0), None, 11));
        let never = sweep(2.0, 0.05, |_| Ok::<_, ()>(false)).unwrap();
        assert_eq!((never.highest, never.tried.len()), (None, 11));
        assert_eq!(sweep(1.0, 0.05, |_| Err(7)), Err(7));
    }
}
