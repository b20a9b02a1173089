//! Any text as the output of `nvidia-smi topo -m`. Whatever is accepted is symmetric, and ranks can be placed on it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ridge_hw::topology::Matrix;
use ridge_plan::topology::{PlacementAdvice, Degrees, Rates};

fuzz_target!(|text: &str| {
    let Ok(matrix) = Matrix::parse(text) else {
        return;
    };
    let gpus = matrix.gpus.len();
    for i in 0..gpus {
        assert!((0..gpus).all(|j| matrix.between[i][j] == matrix.between[j][i]));
    }
    if gpus <= 8 {
        let rates = Rates::find(None, &matrix).expect("a matrix has rates without a device");
        let degrees = Degrees { tp: 2, pp: 1, dp: 1, cp: 1, ep: 1 };
        assert_eq!(PlacementAdvice::new(&matrix, &rates, degrees, 1).is_ok(), gpus >= 2);
    }
});
