//! Weights and states of a run on their way to a device: made, read from a model's files, or from a checkpoint.

use std::num::NonZero;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use half::{bf16, f16};
use ridge_files::Checkpoint;
use ridge_graph::{Arg, DType, Role, Type};
use ridge_models::WeightSource;
use ridge_runtime::{Session, WeightData};

use crate::checkpoint::SavedState;
use crate::error::{Result, TrainError};
use crate::initial::InitialWeight;
use crate::prepare::Prepared;
use crate::prepared_step::KeptState;
use crate::stop::check_stop;

/// Elements that a thread makes before it looks whether the run is to stop, and for which another thread pays.
const PIECE: usize = 1 << 16;

/// Brings what a checkpoint holds to `session`, in place of what is there.
///
/// # Errors
/// When the checkpoint lacks something or memory runs out; [`TrainError::Stopped`] when `stop` is set.
pub(crate) fn load_saved(
    session: &mut Session,
    prepared: &Prepared,
    kept: &[KeptState],
    saved: &SavedState,
    stop: &AtomicBool,
) -> Result<()> {
    for state in kept {
        check_stop(stop)?;
        let shape = state.ty.shape.as_const().unwrap_or_default();
        let data = saved.tensors.tensor(&state.saved, state.ty.dtype, &shape)?;
        if let Some(copy) = state.saved.strip_prefix("weight.").and_then(|name| copy_of(prepared, name)) {
            let elements = decoded(data.bytes(), state.ty.dtype);
            load_made(session, &[(&copy.name, &copy.ty)], shape.iter().product(), &elements, stop)?;
        }
        session.load(&state.name, &state.ty, vec![data])?;
    }
    Ok(())
}

/// The files that the settings name for the weights that a run begins with, and their name in errors. Looks at no element.
///
/// # Errors
/// When they lack a weight, or one is quantised.
pub(crate) fn initial_source(prepared: &Prepared) -> Result<Option<(String, Arc<Checkpoint>)>> {
    let Some(files) = &prepared.from else { return Ok(None) };
    let checkpoint = Arc::new(prepared.step.config.arrange(files.checkpoint()?)?);
    let file = files.to_string();
    for weight in prepared.step.graph.args(Role::Weight) {
        plain_dtype(&file, &checkpoint, &weight.name)?;
    }
    // Requires that its tensors are the weights.
    WeightSource::Checkpoint(Arc::clone(&checkpoint)).retype(&prepared.step.graph, None)?;
    Ok(Some((file, checkpoint)))
}

/// Brings the weights that a run begins with to `session`, whose states are allocated: those of the files that the settings name, else
/// initial ones. Memory of the host is taken for one weight at a time.
///
/// # Errors
/// When a file lacks a weight, a weight is quantised or holds what is no number, or memory runs out; [`TrainError::Stopped`] when
/// `stop` is set.
pub(crate) fn load_initial(
    session: &mut Session,
    prepared: &Prepared,
    kept: &[KeptState],
    stop: &AtomicBool,
) -> Result<()> {
    let source = initial_source(prepared)?;
    let settings = &prepared.step.settings;
    for state in kept {
        check_stop(stop)?;
        let shape = state.ty.shape.as_const().unwrap_or_default();
        let count: usize = shape.iter().product();
        let Some(name) = state.saved.strip_prefix("weight.") else {
            // States are zeros where they are allocated, and running means are loaded with their weights.
            if let Some(fill) = state.fill.filter(|fill| *fill != 0) {
                let bytes = vec![fill; count * state.ty.dtype.size_bytes()];
                session.load(&state.name, &state.ty, vec![WeightData::Owned(bytes)])?;
            }
            continue;
        };
        let mut copies = vec![(&*state.name, &state.ty)];
        copies.extend(copy_of(prepared, name).map(|arg| (&*arg.name, &arg.ty)));
        let mean = kept.iter().find(|mean| mean.saved.strip_prefix("ema.") == Some(name));
        copies.extend(mean.map(|mean| (&*mean.name, &mean.ty)));
        match &source {
            Some((file, checkpoint)) => {
                let dtype = plain_dtype(file, checkpoint, name)?;
                let stored = checkpoint.bytes(name)?;
                // What is rearranged is not kept for a second reader.
                let made = stored.made();
                let elements = decoded(made.as_deref().unwrap_or_else(|| stored.as_ref()), dtype);
                load_made(session, &copies, count, &finite(file, name, elements), stop)?;
            }
            None => {
                let weight =
                    InitialWeight::new(&prepared.step.config, &settings.model, settings.train.seed, name, shape.len());
                let made = |first: usize, to: &mut [f32]| {
                    weight.fill(first, to);
                    Ok(())
                };
                load_made(session, &copies, count, &made, stop)?;
            }
        }
    }
    Ok(())
}

/// The copy of fewer bits that the forward pass reads of the weight `name`, if weights have one.
fn copy_of<'a>(prepared: &'a Prepared, name: &str) -> Option<&'a Arg> {
    let has_copies = prepared.step.settings.train.precision.has_masters();
    prepared.step.graph.args(Role::Weight).filter(|_| has_copies).find(|arg| *arg.name == *name)
}

/// Makes elements of a weight from the given number on.
type Elements<'a> = dyn Fn(usize, &mut [f32]) -> Result<()> + Sync + 'a;

/// A piece of a weight: the number of its first element, of how many, and where they go in each copy.
type Piece<'a> = (usize, usize, Vec<&'a mut [u8]>);

/// Makes the `count` elements of a weight on all cores, rounds them to the dtype of each of `copies`, and loads these.
fn load_made(
    session: &mut Session,
    copies: &[(&str, &Type)],
    count: usize,
    elements: &Elements<'_>,
    stop: &AtomicBool,
) -> Result<()> {
    let dtypes: Vec<DType> = copies.iter().map(|(_, ty)| ty.dtype).collect();
    let mut made: Vec<Vec<u8>> = dtypes.iter().map(|dtype| vec![0; count * dtype.size_bytes()]).collect();
    let mut pieces: Vec<Piece<'_>> =
        (0..count).step_by(PIECE).map(|first| (first, PIECE.min(count - first), Vec::new())).collect();
    for (bytes, dtype) in made.iter_mut().zip(&dtypes) {
        let parts = bytes.chunks_mut(PIECE * dtype.size_bytes());
        pieces.iter_mut().zip(parts).for_each(|((_, _, to), part)| to.push(part));
    }
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(pieces.len());
    let (queue, failed) = (Mutex::new(pieces.into_iter()), AtomicBool::new(false));
    let work = || {
        let mut values = vec![0.0; PIECE.min(count)];
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((first, count, to)) = next.filter(|_| !failed.load(Ordering::Relaxed)) else { return Ok(()) };
            let made = check_stop(stop).and_then(|()| elements(first, &mut values[..count]));
            made.inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
            to.into_iter().zip(&dtypes).for_each(|(to, dtype)| round_into(to, *dtype, &values[..count]));
        }
    };
    std::thread::scope(|scope| {
        // Where the system gives no more threads, there are fewer.
        let others: Vec<_> =
            (1..threads).filter_map(|_| std::thread::Builder::new().spawn_scoped(scope, work).ok()).collect();
        let mine = work();
        let join = |other: std::thread::ScopedJoinHandle<'_, Result<()>>| match other.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        others.into_iter().map(join).fold(mine, Result::and)
    })?;
    for ((name, ty), bytes) in copies.iter().zip(made) {
        session.load(name, ty, vec![WeightData::Owned(bytes)])?;
    }
    Ok(())
}

/// Writes values of `dtype`, little-endian, rounded as [`DType::round`] does.
fn round_into(to: &mut [u8], dtype: DType, values: &[f32]) {
    match dtype {
        DType::F32 => to.as_chunks_mut().0.iter_mut().zip(values).for_each(|(to, value)| *to = value.to_le_bytes()),
        DType::BF16 => {
            let rounded = values.iter().map(|value| bf16::from_f32(*value).to_le_bytes());
            to.as_chunks_mut().0.iter_mut().zip(rounded).for_each(|(to, bytes)| *to = bytes);
        }
        DType::F16 => {
            let rounded = values.iter().map(|value| f16::from_f32(*value).to_le_bytes());
            to.as_chunks_mut().0.iter_mut().zip(rounded).for_each(|(to, bytes)| *to = bytes);
        }
        other => to.copy_from_slice(&other.encode(values.iter().copied().map(f64::from))),
    }
}

/// Elements that are stored in `dtype`, whose floats are all f32.
fn decoded(bytes: &[u8], dtype: DType) -> impl Fn(usize, &mut [f32]) -> Result<()> + Sync + '_ {
    move |first, to| {
        let size = dtype.size_bytes();
        let values = dtype.decode(&bytes[first * size..][..to.len() * size]);
        to.iter_mut().zip(values).for_each(|(to, value)| *to = value as f32);
        Ok(())
    }
}

/// The same elements, which must be numbers.
fn finite<'a>(
    file: &'a str,
    name: &'a str,
    elements: impl Fn(usize, &mut [f32]) -> Result<()> + Sync + 'a,
) -> impl Fn(usize, &mut [f32]) -> Result<()> + Sync + 'a {
    move |first, to| {
        elements(first, to)?;
        let Some(at) = to.iter().position(|value| !value.is_finite()) else { return Ok(()) };
        let problem = format!("its weight {name} holds {} at element {}", to[at], first + at);
        Err(TrainError::path(file, problem, "download it again, or continue from another checkpoint"))
    }
}

/// The dtype of a published weight, which must be stored plainly.
fn plain_dtype(file: &str, checkpoint: &Checkpoint, name: &str) -> Result<DType> {
    if checkpoint.format(name).is_some() {
        let remedy =
            format!("convert it to a folder of plain weights with `ridge convert {file} FOLDER`, and train on that");
        return Err(TrainError::path(file, format!("its weight {name} is quantised"), remedy));
    }
    Ok(checkpoint.dtype(name).unwrap_or(DType::F32))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use ridge_cpu::{Cpu, CpuOptions};
    use ridge_graph::sample::Rng;

    use super::*;

    fn session() -> Session {
        Session::new(Arc::new(Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).expect("starts")))
    }

    #[test]
    fn every_copy_of_a_weight_has_all_elements_as_its_dtype_rounds_them() {
        let mut session = session();
        for count in [0, 1, PIECE - 1, PIECE, 5 * PIECE + 3] {
            let mut rng = Rng::new(count as u64);
            // Of every magnitude that the dtypes have, and beyond.
            let values: Vec<f32> =
                (0..count).map(|_| (rng.gauss() * 10f64.powf(rng.unit() * 50.0 - 45.0)) as f32).collect();
            let dtypes = [DType::F32, DType::BF16, DType::F16, DType::F8E4M3];
            let types = dtypes.map(|dtype| Type::tensor(dtype, ridge_graph::Shape::new([count])));
            let names = dtypes.map(|dtype| format!("{dtype}.{count}"));
            let copies: Vec<(&str, &Type)> = names.iter().map(String::as_str).zip(&types).collect();
            let elements = |first: usize, to: &mut [f32]| {
                to.copy_from_slice(&values[first..][..to.len()]);
                Ok(())
            };
            load_made(&mut session, &copies, count, &elements, &AtomicBool::new(false)).expect("loads");
            for (name, ty) in copies {
                let bytes = session.backend().read(&session.state(name).expect("is there")).expect("reads");
                assert!(bytes == ty.dtype.encode(values.iter().copied().map(f64::from)), "{count} in {}", ty.dtype);
            }
        }
    }

    #[test]
    fn a_large_weight_is_left_where_the_run_is_to_stop() {
        let mut session = session();
        let (stop, pieces) = (AtomicBool::new(false), AtomicUsize::new(0));
        let elements = |_: usize, _: &mut [f32]| {
            pieces.fetch_add(1, Ordering::Relaxed);
            stop.store(true, Ordering::Relaxed);
            Ok(())
        };
        let ty = Type::tensor(DType::F32, ridge_graph::Shape::new([1000 * PIECE]));
        let made = load_made(&mut session, &[("w", &ty)], 1000 * PIECE, &elements, &stop);
        assert!(matches!(made, Err(TrainError::Stopped)), "{made:?}");
        // One of each thread at most.
        let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
        assert!(pieces.load(Ordering::Relaxed) <= threads && session.state("w").is_none());
    }

    #[test]
    fn what_is_no_number_is_named_with_its_place() {
        let mut session = session();
        let mut values = vec![1.0; 2 * PIECE];
        values[PIECE + 7] = f64::NAN;
        let bytes = DType::BF16.encode(values);
        let ty = Type::tensor(DType::F32, ridge_graph::Shape::new([2 * PIECE]));
        let elements = finite("model.safetensors", "w", decoded(&bytes, DType::BF16));
        let made = load_made(&mut session, &[("w", &ty)], 2 * PIECE, &elements, &AtomicBool::new(false));
        let text = made.expect_err("is refused").to_string();
        assert!(text.contains(&format!("its weight w holds NaN at element {};", PIECE + 7)), "{text}");
    }
}
