//! The closed form of a bubble, for a search that cannot afford a simulation.

/// Seconds that a step of 1F1B, interleaved over `chunks` where that is above 1, takes beyond the passes of its slowest
/// device: `(p - 1) / v` of a device's passes and their messages. `device` is the time of all passes of a micro-batch on
/// a device, `message` that of one message, which its sender waits for; every chunk sends one each way.
pub fn bubble(devices: usize, chunks: usize, micro_batches: usize, device: f64, message: f64) -> f64 {
    if devices <= 1 {
        return 0.0;
    }
    let (p, v, m) = (devices as f64, chunks as f64, micro_batches as f64);
    (p - 1.0) * (device / v + 2.0 * message) + m * v * 2.0 * message
}
