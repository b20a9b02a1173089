//! Ranks of a mesh axis within one process: collectives over shared memory, for tests and for machines of several
//! sockets.

use std::sync::{Arc, Barrier, Mutex, PoisonError};

use half::{bf16, f16};
use ridge_graph::DType;
use ridge_runtime::Collectives;

/// One rank's end of a group within this process. Each rank runs on a thread of its own.
pub struct Loopback {
    shared: Arc<LoopbackState>,
    rank: usize,
}

struct LoopbackState {
    /// What each rank has brought.
    parts: Vec<Mutex<Vec<u8>>>,
    barrier: Barrier,
}

impl Loopback {
    /// The ends of a group of `ranks` ranks, in rank order.
    pub fn group(ranks: usize) -> Vec<Arc<dyn Collectives>> {
        let parts = (0..ranks).map(|_| Mutex::default()).collect();
        let shared = Arc::new(LoopbackState { parts, barrier: Barrier::new(ranks) });
        (0..ranks).map(|rank| Arc::new(Self { shared: Arc::clone(&shared), rank }) as Arc<dyn Collectives>).collect()
    }

    /// Shows every rank's bytes to every rank, in rank order.
    fn exchange(&self, mine: &[u8], mut each: impl FnMut(usize, &[u8])) {
        {
            let mut part = self.shared.parts[self.rank].lock().unwrap_or_else(PoisonError::into_inner);
            part.clear();
            part.extend_from_slice(mine);
        }
        self.shared.barrier.wait();
        for (rank, part) in self.shared.parts.iter().enumerate() {
            each(rank, &part.lock().unwrap_or_else(PoisonError::into_inner));
        }
        // Nobody brings the next part before all have read this one.
        self.shared.barrier.wait();
    }
}

impl Collectives for Loopback {
    fn ranks(&self) -> usize {
        self.shared.parts.len()
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn all_reduce(&self, dtype: DType, data: &mut [u8]) {
        // In rank order from zero, in f64 for floats: the same bits on every rank.
        let mut floats = vec![0f64; if dtype.is_float() { data.len() / dtype.size_bytes() } else { 0 }];
        let mut ints = vec![0i64; if dtype.is_float() { 0 } else { data.len() / dtype.size_bytes() }];
        self.exchange(data, |_, part| match dtype {
            DType::F32 => accumulate(part, &mut floats, |c: [u8; 4]| f64::from(f32::from_le_bytes(c))),
            DType::BF16 => accumulate(part, &mut floats, |c: [u8; 2]| bf16::from_le_bytes(c).to_f64()),
            DType::F16 => accumulate(part, &mut floats, |c: [u8; 2]| f16::from_le_bytes(c).to_f64()),
            DType::I64 => {
                for (sum, c) in ints.iter_mut().zip(part.as_chunks::<8>().0) {
                    *sum = sum.wrapping_add(i64::from_le_bytes(*c));
                }
            }
            _ if dtype.is_float() => {
                for (sum, x) in floats.iter_mut().zip(dtype.decode(part)) {
                    *sum += x;
                }
            }
            _ => {
                for (sum, x) in ints.iter_mut().zip(dtype.decode(part)) {
                    *sum = sum.wrapping_add(x as i64);
                }
            }
        });
        let bytes: Vec<u8> = match dtype {
            _ if dtype.is_float() => dtype.encode(floats),
            DType::Bool => ints.iter().map(|x| u8::from(*x != 0)).collect(),
            // Modulo the size.
            _ => ints.iter().flat_map(|x| x.to_le_bytes().into_iter().take(dtype.size_bytes())).collect(),
        };
        data.copy_from_slice(&bytes);
    }

    fn all_gather(&self, part: &[u8], whole: &mut [u8]) {
        let size = part.len();
        self.exchange(part, |rank, bytes| whole[rank * size..(rank + 1) * size].copy_from_slice(bytes));
    }
}

fn accumulate<const N: usize>(part: &[u8], sums: &mut [f64], f: impl Fn([u8; N]) -> f64) {
    for (sum, chunk) in sums.iter_mut().zip(part.as_chunks::<N>().0) {
        *sum += f(*chunk);
    }
}
