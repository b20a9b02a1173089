//! Which kernels of a bucket take their weights in panels.

use std::sync::Arc;

use ridge_runtime::{Place, Plan, Region};

use crate::kernel::CpuKernel;

/// Which kernels get their weights in panels, and of each weight the elements of a row if it is bound so: those that
/// `has_panels` of rows of so many elements, that nothing in the bucket reads otherwise, of kernels that get no other weight.
pub(crate) fn in_panels(
    plan: &Plan,
    kernels: &[Arc<dyn CpuKernel>],
    has_panels: impl Fn(usize, usize) -> bool,
) -> (Vec<bool>, Vec<Option<usize>>) {
    let takes: Vec<_> = kernels.iter().map(|k| k.takes_panels()).collect();
    let mut by: Vec<bool> = takes.iter().map(|inputs| !inputs.is_empty()).collect();
    loop {
        let mut inner = vec![None; plan.weight_bytes.len()];
        let mut otherwise = vec![false; plan.weight_bytes.len()];
        for launch in &plan.launches {
            for (i, place) in launch.inputs.iter().enumerate() {
                let Region::Weight(weight) = place.region else { continue };
                let weight = weight as usize;
                let row = plan.kernels[launch.kernel].inputs[i].last().copied();
                let so = by[launch.kernel] && takes[launch.kernel].contains(&i) && place.offset == 0;
                let so = so && row.is_some_and(|row| has_panels(weight, row));
                otherwise[weight] |= !so || inner[weight].is_some_and(|known| Some(known) != row);
                inner[weight] = row;
            }
        }
        let fits = |place: &Place| matches!(place.region, Region::Weight(w) if !otherwise[w as usize]);
        let refused = plan.launches.iter().filter(|l| by[l.kernel]);
        let refused = refused.filter(|l| !takes[l.kernel].clone().all(|i| fits(&l.inputs[i])));
        let refused: Vec<usize> = refused.map(|l| l.kernel).collect();
        if refused.is_empty() {
            let inner = inner.into_iter().zip(otherwise).map(|(inner, otherwise)| inner.filter(|_| !otherwise));
            return (by, inner.collect());
        }
        refused.into_iter().for_each(|kernel| by[kernel] = false);
    }
}
