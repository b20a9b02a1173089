//! Placements on published machines, and against all orders of GPUs where those can be tried.

use ridge_hw::topology::{Matrix, PathType};

use super::*;

fn machine(name: &str) -> Matrix {
    let path = format!("{}/../../fixtures/topology/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    Matrix::parse(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn advice(name: &str, device: Option<&str>, degrees: Degrees, nodes: usize) -> PlacementAdvice {
    let matrix = machine(name);
    PlacementAdvice::new(&matrix, &Rates::find(device, &matrix).unwrap(), degrees, nodes).unwrap()
}

fn degrees(tp: usize, cp: usize, dp: usize, pp: usize) -> Degrees {
    Degrees { tp, pp, dp, cp, ep: 1 }
}

fn rate(placement: &RankPlacement, axis: ParallelAxis) -> f64 {
    placement.axes.iter().find(|a| a.axis == axis).unwrap().rate
}

fn gpus(placement: &RankPlacement) -> Vec<&str> {
    placement.seats.iter().map(|s| &s.gpu[3..]).collect()
}

#[test]
fn a_device_is_told_by_its_nvlinks_and_each_way_carries_less() {
    let h100 = Rates::find(None, &machine("dgx-h100")).unwrap();
    assert_eq!((&*h100.device, h100.of(PathType::NvLink(18))), ("H100-SXM", 18.0 * 20.6e9));
    assert_eq!(Rates::find(None, &machine("dgx-a100")).unwrap().device, "A100-SXM");
    assert_eq!(Rates::find(Some("B200"), &machine("dgx-h100")).unwrap().nvlink, 40.1e9);
    let ways = [PathType::NvLink(1), PathType::Pix, PathType::Pxb, PathType::Phb, PathType::Node, PathType::Sys]
        .map(|w| h100.of(w));
    assert!(ways[1..].is_sorted_by(|a, b| a >= b), "{ways:?}");
    assert!(Rates::find(Some("H10O"), &machine("dgx-h100")).is_err());
}

#[test]
fn on_eight_nodes_tensor_parallelism_stays_inside_and_the_rest_goes_along_rails() {
    let a = advice("dgx-h100", None, degrees(8, 1, 4, 2), 8);
    assert_eq!(gpus(&a.best), ["0", "1", "2", "3", "4", "5", "6", "7"], "what is alike keeps its order");
    assert_eq!(rate(&a.best, ParallelAxis::Tp), 18.0 * 20.6e9);
    // Each GPU its own card, through switches: 400 Gb/s, less than PCIe.
    assert_eq!((rate(&a.best, ParallelAxis::Dp), rate(&a.best, ParallelAxis::Pp)), (48e9, 48e9));
    assert!(a.best.axes.iter().filter(|x| x.axis != ParallelAxis::Tp).all(|x| x.rail && x.in_node == 1));
    let cards: Vec<_> = a.best.seats.iter().map(|s| s.nic.clone().unwrap()).collect();
    assert_eq!(cards, ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"]);
    // The other way round tensor parallelism is between nodes.
    assert!(rate(&a.reversed, ParallelAxis::Tp) < 0.2 * rate(&a.best, ParallelAxis::Tp));
}

#[test]
fn two_gpus_of_a_dgx_a100_share_two_cards() {
    let a = advice("dgx-a100", None, degrees(8, 1, 2, 1), 2);
    let cards: std::collections::BTreeSet<_> = a.best.seats.iter().map(|s| s.nic.clone().unwrap()).collect();
    assert_eq!(cards.len(), 8);
    assert!(a.best.seats.iter().all(|s| s.to_nic == Some(PathType::Pxb) && s.port == 24e9));
}

#[test]
fn tensor_parallel_pairs_go_under_bridges() {
    let a = advice("4-a6000-bridges", None, degrees(2, 1, 2, 1), 1);
    assert_eq!(gpus(&a.best), ["0", "2", "1", "3"]);
    assert_eq!(rate(&a.best, ParallelAxis::Tp), 80e9);
    // Both pairs of ranks that are numbered as the GPUs are cross nodes for nothing.
    assert!(rate(&a.shuffled, ParallelAxis::Tp) < 0.2 * 80e9, "{:?}", a.shuffled.axes);
    // Two ranks of four GPUs.
    let two = advice("4-a6000-bridges", None, degrees(2, 1, 1, 1), 1);
    assert_eq!((gpus(&two.best), rate(&two.best, ParallelAxis::Tp)), (vec!["0", "2"], 80e9));
}

#[test]
fn what_crosses_between_numa_nodes_is_shared() {
    let a = advice("4-a6000-bridges", None, degrees(2, 1, 2, 1), 1);
    let worst = a.shuffled.axes.iter().find(|x| x.axis == ParallelAxis::Tp).unwrap();
    assert_eq!((worst.way, worst.sharing, worst.rate), (Some(PathType::Sys), 2, 11e9));
}

#[test]
fn no_order_of_a_cube_meshs_gpus_is_better_than_the_one_found() {
    let (matrix, divided) =
        (machine("8-v100-cube-mesh"), [degrees(2, 1, 4, 1), degrees(4, 1, 2, 1), degrees(2, 2, 1, 2)]);
    for degrees in divided {
        let rates = Rates::find(None, &matrix).unwrap();
        let best = PlacementAdvice::new(&matrix, &rates, degrees, 1).unwrap().best;
        let found: Vec<usize> = gpus(&best).iter().map(|gpu| gpu.parse().unwrap()).collect();
        let mut order: Vec<usize> = (0..8).collect();
        let place = place::PlacementSearch { matrix: &matrix, rates: &rates, degrees, local: 8, nodes: 1 };
        permute(&mut order, 0, &mut |order| assert!(!place.better(order, &found), "{order:?} {found:?}"));
    }
}

fn permute(order: &mut Vec<usize>, from: usize, visit: &mut impl FnMut(&[usize])) {
    if from == order.len() {
        return visit(order);
    }
    for i in from..order.len() {
        order.swap(from, i);
        permute(order, from + 1, visit);
        order.swap(from, i);
    }
}

#[test]
fn degrees_that_do_not_fill_the_machines_are_refused() {
    let matrix = machine("dgx-h100");
    let rates = Rates::find(None, &matrix).unwrap();
    for (degrees, nodes, wanted) in [
        (degrees(8, 1, 4, 1), 2, "set nodes = 4"),
        (degrees(8, 1, 3, 1), 2, "set nodes = 3"),
        (degrees(2, 1, 1, 1), 3, "multiple of 3"),
        (degrees(0, 1, 1, 1), 1, "tp = 0 is not a valid degree"),
        (degrees(2, 1, 4, 1), 0, "nodes = 0"),
        (Degrees { ep: 3, ..degrees(2, 1, 4, 1) }, 1, "the nearest below is 2"),
        (Degrees { dp: usize::MAX, ..degrees(8, 1, 1, 1) }, 1, "exceeds the"),
    ] {
        let said = PlacementAdvice::new(&matrix, &rates, degrees, nodes).unwrap_err().to_string();
        assert!(said.contains(wanted), "{said}");
    }
}
