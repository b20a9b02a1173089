//! Which weights of a bucket are repacked in panels.

use std::sync::Arc;

use ridge_runtime::{Place, Plan, Region};

use crate::kernel::CpuKernel;

/// Which kernels get their weights in panels, and of each weight the elements of a row if it is so repacked: those that
/// nobody uses otherwise, of kernels that get no other weight. Memory that is written, as a state is, stays as it lies.
pub(crate) fn in_panels(
    plan: &Plan,
    kernels: &[Arc<dyn CpuKernel>],
    is_written: impl Fn(usize) -> bool,
) -> (Vec<bool>, Vec<Option<usize>>) {
    let takes: Vec<_> = kernels.iter().map(|k| k.takes_panels()).collect();
    let mut by: Vec<bool> = takes.iter().map(|inputs| !inputs.is_empty()).collect();
    loop {
        let mut inner = vec![None; plan.weight_bytes.len()];
        let mut otherwise: Vec<bool> = (0..plan.weight_bytes.len()).map(&is_written).collect();
        for launch in &plan.launches {
            for (i, place) in launch.inputs.iter().enumerate() {
                let Region::Weight(weight) = place.region else { continue };
                let weight = weight as usize;
                let row = plan.kernels[launch.kernel].inputs[i].last().copied();
                let so = by[launch.kernel] && takes[launch.kernel].contains(&i) && place.offset == 0;
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
