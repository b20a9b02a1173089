//! From a checkpoint, or from nothing, to the weights of a graph on a device.

use std::collections::HashMap;
use std::sync::Arc;

use ridge_files::Checkpoint;
use ridge_files::checkpoint::TensorBytes;
use ridge_graph::format::ScaledFormat;
use ridge_graph::sample::Rng;
use ridge_graph::{Arg, DType, FormatRef, Graph, Role, Shape, Type, passes};
use ridge_runtime::{Session, WeightData};

use crate::error::{ModelError, Result};
use crate::families::{ModelConfig, families};
use crate::model::Model;
use crate::module::Module;

/// Patterns of tensors that checkpoints carry and graphs may not need: tables and masks that are computed, and an output
/// projection that is tied to the embedding.
fn unneeded() -> Vec<String> {
    let tables = families().map(|family| &family.tensors);
    tables.flat_map(|t| t.computed.iter().map(|name| (*name).to_owned()).chain(t.head.weight())).collect()
}

/// Requires that the tensors of `checkpoint` are the weights of `graph`.
///
/// # Errors
/// [`FilesError::Tensors`](ridge_files::FilesError::Tensors) with all that are missing, too many or of another shape; and when one is not of floats.
pub(crate) fn check(checkpoint: &Checkpoint, graph: &Graph) -> Result<()> {
    let expected =
        graph.args(Role::Weight).map(|a| Ok((a.name.to_string(), extents(a)?))).collect::<Result<Vec<_>>>()?;
    let unneeded = unneeded();
    let unneeded: Vec<&str> = unneeded.iter().map(String::as_str).collect();
    checkpoint.check(expected, &unneeded)?;
    graph.args(Role::Weight).try_for_each(|weight| Ok(checkpoint.check_float(&weight.name)?))
}

/// Where weights come from.
#[derive(Clone, Debug)]
pub enum WeightSource {
    /// A published checkpoint.
    Checkpoint(Arc<Checkpoint>),
    /// Normal numbers of standard deviation 0.02 and norms of one, in this dtype: for timing shapes. Large weights in a format
    /// repeat some millions of them.
    Random(DType),
    /// The same in the dtype and the formats in which the configuration says that the model is published.
    RandomAsPublished(Box<ModelConfig>),
}

impl WeightSource {
    /// `graph` with each weight stored as the source has it, and with matrices in `format` where it is given and their
    /// shape allows it; in a [`ScaledFormat`] only the matrices of layers' products.
    ///
    /// # Errors
    /// [`FilesError::Tensors`](ridge_files::FilesError::Tensors) when the checkpoint's tensors are not the graph's weights.
    pub fn retype(&self, graph: &Graph, format: Option<&FormatRef>) -> Result<Graph> {
        if let Self::Checkpoint(checkpoint) = self {
            check(checkpoint, graph)?;
        }
        // Codes with scales are for products: embeddings and the output projection keep their dtype, as fp8 checkpoints are
        // published.
        let scaled = format.is_some_and(|format| format.downcast::<ScaledFormat>().is_some());
        let layers = scaled.then(|| passes::layer_weights(graph));
        let storage = |name: &str, ty: &Type| {
            let dtype = match self {
                Self::Checkpoint(checkpoint) => checkpoint.dtype(name)?,
                Self::Random(dtype) => *dtype,
                Self::RandomAsPublished(config) => config.torch_dtype.unwrap_or(DType::F32),
            };
            let plain = Type { dtype, ..ty.clone() };
            // Biases of experts have two axes, and are no matrices.
            let takes = matches!(ty.shape.rank(), 2 | 3)
                && !name.ends_with(".bias")
                && layers.as_ref().is_none_or(|layers| layers.contains(name));
            let quantised = format.filter(|f| takes && f.check(&ty.shape).is_ok());
            let published = || match self {
                Self::RandomAsPublished(config) => {
                    config.published_format(name, ty.shape.rank()).filter(|f| f.check(&ty.shape).is_ok())
                }
                _ => self.format(name).cloned(),
            };
            Some(match quantised.cloned().or_else(published) {
                Some(f) => plain.stored_as(f),
                None => plain,
            })
        };
        Ok(passes::retype(graph, &storage)?)
    }

    /// Brings every weight of `graph`, as [`WeightSource::retype`] made it, to the session's device. `progress` is
    /// called after each weight with the number of bytes loaded so far.
    ///
    /// # Errors
    /// When a tensor is missing, the extents of a weight depend on a symbol, or memory runs out.
    pub fn load(&self, session: &mut Session, graph: &Graph, mut progress: impl FnMut(u64)) -> Result<()> {
        let mut done = 0;
        for arg in graph.args(Role::Weight) {
            done += self.load_whole(session, arg)?;
            progress(done);
        }
        Ok(())
    }

    fn load_whole(&self, session: &mut Session, arg: &Arg) -> Result<u64> {
        let shape = extents(arg)?;
        let made = match self {
            Self::Random(_) | Self::RandomAsPublished(_) => {
                arg.ty.shape.rank() >= 2
                    && session.load_random(&arg.name, &arg.ty, generator(&arg.name).state(), RANDOM_SCALE)?
            }
            // What is stored as elements, and shall be in a format, the device may encode.
            Self::Checkpoint(_) => match (&arg.ty.format, self.format(&arg.name)) {
                (Some(_), None) => {
                    let plain = Arg { ty: Type { format: None, ..arg.ty.clone() }, ..arg.clone() };
                    match &*self.parts(&plain, &shape)? {
                        [plain] => session.load_encoded(&arg.name, &arg.ty, plain)?,
                        _ => false,
                    }
                }
                _ => false,
            },
        };
        if made {
            return Ok(arg.ty.bytes().as_const().map_or(0, |bytes| bytes as u64));
        }
        let parts = self.parts(arg, &shape)?;
        let bytes = parts.iter().map(|p| p.bytes().len() as u64).sum();
        session.load(&arg.name, &arg.ty, parts)?;
        Ok(bytes)
    }

    /// The format that the source has the weight `name` in, if it is in one.
    fn format(&self, name: &str) -> Option<&FormatRef> {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.format(name),
            Self::Random(_) | Self::RandomAsPublished(_) => None,
        }
    }

    fn parts(&self, arg: &Arg, shape: &[usize]) -> Result<Vec<WeightData>> {
        // What is rearranged is handed over rather than shared: else the checkpoint would keep a second copy of the model.
        let data = |bytes: TensorBytes| match bytes.made() {
            Some(made) => WeightData::Owned(made),
            None => {
                let len = bytes.as_ref().len();
                WeightData::Shared(Arc::new(bytes), 0..len)
            }
        };
        if let (Self::Random(_) | Self::RandomAsPublished(_), Some(format)) = (self, &arg.ty.format) {
            let components = random_in(format, &arg.name, arg.ty.dtype, shape);
            return Ok(components.into_iter().map(WeightData::Owned).collect());
        }
        let components = match self {
            Self::Checkpoint(checkpoint) => checkpoint.components(&arg.name)?.into_iter().map(data).collect(),
            Self::Random(_) | Self::RandomAsPublished(_) => {
                vec![WeightData::Owned(random(&arg.name, arg.ty.dtype, shape))]
            }
        };
        let stored = self.format(&arg.name);
        let Some(format) = arg.ty.format.as_ref().filter(|format| Some(*format) != stored) else {
            return Ok(components);
        };
        let encoded = match stored {
            Some(stored) => {
                let values = stored.values(&components.iter().map(WeightData::bytes).collect::<Vec<_>>(), shape);
                format.encode(&values, shape, None)
            }
            None => encoded(format, arg.ty.dtype, components[0].bytes(), shape),
        };
        Ok(encoded.into_iter().map(WeightData::Owned).collect())
    }
}

/// The components in `format` of elements of `dtype`, little-endian, of a tensor of `shape`: rows on all cores where the format
/// keeps them apart.
fn encoded(format: &FormatRef, dtype: DType, bytes: &[u8], shape: &[usize]) -> Vec<Vec<u8>> {
    let encode = |bytes: &[u8], shape: &[usize]| {
        let values: Vec<f32> = dtype.decode(bytes).into_iter().map(|v| v as f32).collect();
        format.encode(&values, shape, None)
    };
    let [rows, width] = as_matrix(shape);
    if !keeps_rows_apart(format, [rows, width]) || rows == 0 {
        return encode(bytes, shape);
    }
    // A core's rows in pieces, so that the elements of a piece are still in cache when they are encoded.
    let row_bytes = width * dtype.size_bytes();
    let piece = (PIECE / width).max(1) * row_bytes;
    let encode_rows = |bytes: &[u8]| {
        let mut all = vec![Vec::new(); format.components(&Shape::new([rows, width])).len()];
        for piece in bytes.chunks(piece) {
            let parts = encode(piece, &[piece.len() / row_bytes, width]);
            all.iter_mut().zip(parts).for_each(|(all, part)| all.extend(part));
        }
        all
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(rows);
    let share = rows.div_ceil(threads);
    std::thread::scope(|scope| {
        let encode_rows = &encode_rows;
        let shares = bytes.chunks(share * row_bytes);
        let parts: Vec<_> = shares.map(|share| scope.spawn(move || encode_rows(share))).collect();
        let mut all = vec![Vec::new(); format.components(&Shape::new([rows, width])).len()];
        for part in parts {
            let part = part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            all.iter_mut().zip(part).for_each(|(all, part)| all.extend(part));
        }
        all
    })
}

/// The components in `format` of a random weight of `dtype` and `shape`. To encode takes far longer than to make numbers, so of a large
/// weight some rows are encoded and repeated.
fn random_in(format: &FormatRef, name: &str, dtype: DType, shape: &[usize]) -> Vec<Vec<u8>> {
    let [rows, width] = as_matrix(shape);
    let few = (ENCODED / width).clamp(1, rows.max(1));
    if rows <= few || !keeps_rows_apart(format, [rows, width]) {
        return encoded(format, dtype, &random(name, dtype, shape), shape);
    }
    let parts = encoded(format, dtype, &random(name, dtype, &[few, width]), &[few, width]);
    let repeated = |part: Vec<u8>| {
        let bytes = part.len() / few * rows;
        let mut all = Vec::with_capacity(bytes);
        while all.len() < bytes {
            all.extend_from_slice(&part[..part.len().min(bytes - all.len())]);
        }
        all
    };
    parts.into_iter().map(repeated).collect()
}

/// Rows and width of a tensor as one matrix.
fn as_matrix(shape: &[usize]) -> [usize; 2] {
    let width = shape.last().copied().unwrap_or(1).max(1);
    [shape.iter().product::<usize>() / width, width]
}

/// Whether every component of a matrix in `format` has its rows one behind the other.
fn keeps_rows_apart(format: &FormatRef, [rows, width]: [usize; 2]) -> bool {
    let components = format.components(&Shape::new([rows, width]));
    components.iter().all(|c| c.shape.rank() == 2 && c.shape.0[0].as_const() == Some(rows))
}

/// Elements of a random weight that are encoded at most.
const ENCODED: usize = 1 << 22;
/// Elements that are decoded and encoded at a time.
const PIECE: usize = 1 << 14;

impl Module {
    /// Gives every parameter the storage that `source` has, and matrices `format` where it is given and their shape allows
    /// it: [`WeightSource::retype`].
    ///
    /// # Errors
    /// [`FilesError::Tensors`](ridge_files::FilesError::Tensors) when the checkpoint's tensors are not the parameters.
    pub fn store(&mut self, source: &WeightSource, format: Option<&FormatRef>) -> Result<()> {
        self.graph = source.retype(&self.graph, format)?;
        Ok(())
    }

    /// Brings the parameters to the session's device, of a module that was cut over ranks the shares of the ranks that
    /// the session's backend drives: of all, or of `rank` alone. `progress` is called after each parameter with the number
    /// of bytes that one rank has loaded so far.
    ///
    /// # Errors
    /// As for [`WeightSource::load`], and when a parameter is not cut so.
    pub fn load(
        &self,
        source: &WeightSource,
        session: &mut Session,
        rank: Option<usize>,
        mut progress: impl FnMut(u64),
    ) -> Result<()> {
        let Some(shares) = &self.shares else { return source.load(session, &self.graph, progress) };
        let mut done = 0;
        for arg in self.parameters() {
            let whole = shares.whole(&arg.name).filter(|whole| **whole != arg.ty);
            match whole {
                // Every rank has all of it, but for a summand, of which they have different ones of one type.
                None if !shares.is_summand(&arg.name) => {
                    done += source.load_whole(session, arg)?;
                }
                _ => {
                    let whole = Arg { ty: whole.unwrap_or(&arg.ty).clone(), ..arg.clone() };
                    let parts = source.parts(&whole, &extents(&whole)?)?;
                    let ranks = rank.map_or(0..shares.axis().ranks, |rank| rank..rank + 1);
                    let of = |rank| shares.of(&arg.name, &parts, rank);
                    let given = ranks.map(of).collect::<Result<Vec<_>>>()?;
                    done +=
                        given.iter().flatten().map(|part| part.bytes().len() as u64).sum::<u64>() / given.len() as u64;
                    session.load_shares(&arg.name, &arg.ty, given)?;
                }
            }
            progress(done);
        }
        Ok(())
    }
}

impl Model {
    /// As [`Module::store`], of the drafting graph too.
    ///
    /// # Errors
    /// As for [`Module::store`].
    pub fn store(&mut self, source: &WeightSource, format: Option<&FormatRef>) -> Result<()> {
        self.module.store(source, format)?;
        if let Some(drafts) = &mut self.drafts {
            let types: HashMap<_, _> = self.module.parameters().map(|arg| (&*arg.name, &arg.ty)).collect();
            *drafts = passes::retype(drafts, &|name: &str, _: &Type| types.get(name).map(|ty| (*ty).clone()))?;
        }
        Ok(())
    }
}

/// The extents of a weight.
///
/// # Errors
/// When they depend on a symbol: no file and no generator can supply such a weight.
fn extents(weight: &Arg) -> Result<Vec<usize>> {
    weight
        .ty
        .shape
        .as_const()
        .ok_or_else(|| ModelError::SymbolicWeight { name: weight.name.to_string(), shape: weight.ty.shape.to_string() })
}

/// A random weight's generator, of its name.
fn generator(name: &str) -> Rng {
    Rng::new(name.bytes().fold(0, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(b))))
}

/// Brings the sum of two bytes, which is triangular and of standard deviation 104.5, to one of 0.02.
const RANDOM_SCALE: f64 = 0.02 / 104.5;

/// Bytes of a random weight that is the same for the same name and shape. Quick rather than fine: sums of uniform
/// numbers are normal enough for timing.
fn random(name: &str, dtype: DType, shape: &[usize]) -> Vec<u8> {
    let elements: usize = shape.iter().product();
    if shape.len() < 2 {
        // Norms of one, biases of zero.
        let value = if name.ends_with("bias") { 0.0 } else { 1.0 };
        return dtype.encode(std::iter::repeat_n(value, elements));
    }
    // What each sum of two bytes is: there are few.
    let table = dtype.encode((0..=2 * 255).map(|sum| (f64::from(sum) - 255.0) * RANDOM_SCALE));
    let size = dtype.size_bytes();
    let mut bytes = vec![0; elements * size];
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let each = elements.div_ceil(threads).max(1 << 16).next_multiple_of(NUMBERS);
    std::thread::scope(|scope| {
        for (i, part) in bytes.chunks_mut(each * size).enumerate() {
            let (table, rng) = (&table, generator(name).after((i * each / NUMBERS) as u64));
            scope.spawn(move || match size {
                1 => fill::<1>(part, table, rng),
                2 => fill::<2>(part, table, rng),
                4 => fill::<4>(part, table, rng),
                _ => fill::<8>(part, table, rng),
            });
        }
    });
    bytes
}

/// Numbers of a draw of the generator.
const NUMBERS: usize = 4;

/// Random numbers of `N` bytes each, by the sums of two bytes of the draws of `rng`. One number in four of a longer sequence: the
/// bits of a weight need not be independent of the next matrix's.
fn fill<const N: usize>(to: &mut [u8], table: &[u8], mut rng: Rng) {
    let table = table.as_chunks::<N>().0;
    for numbers in to.as_chunks_mut::<N>().0.chunks_mut(NUMBERS) {
        let bits = rng.bits();
        for (i, number) in numbers.iter_mut().enumerate() {
            let bits = (bits >> (16 * (NUMBERS - 1 - i))) as u16;
            *number = table[usize::from(bits & 0xff) + usize::from(bits >> 8)];
        }
    }
}

impl From<ridge_runtime::RuntimeError> for ModelError {
    fn from(error: ridge_runtime::RuntimeError) -> Self {
        Self::Runtime(error)
    }
}

impl From<ridge_graph::GraphError> for ModelError {
    fn from(error: ridge_graph::GraphError) -> Self {
        Self::Runtime(error.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ridge_graph::format::ScaleLayout;

    #[test]
    fn rows_are_encoded_on_all_cores_as_on_one() {
        let shape = [3, 7, 512];
        let bytes = random("w", DType::BF16, &shape);
        let values: Vec<f32> = DType::BF16.decode(&bytes).into_iter().map(|v| v as f32).collect();
        let scaled = ScaledFormat::all().map(FormatRef::new);
        let mut split = 0;
        for format in ridge_graph::format::all().into_iter().chain(scaled) {
            assert_eq!(
                encoded(&format, DType::BF16, &bytes, &shape),
                format.encode(&values, &shape, None),
                "{}",
                format.name()
            );
            let layout = format.downcast::<ScaledFormat>().map(|scaled| scaled.scales);
            split += usize::from(!matches!(layout, Some(ScaleLayout::Tensor | ScaleLayout::Block)));
        }
        assert!(split > 20, "{split} formats keep rows apart");
    }

    #[test]
    fn random_weights_are_those_that_devices_make_however_many_threads_make_them() {
        // More than a thread takes, and no multiple of what a draw gives.
        let shape = [3, 70_001];
        for dtype in [DType::F32, DType::BF16, DType::F8E4M3] {
            let state = generator("w").state();
            let element = |i: usize| {
                let bits = Rng::at(state).after(i as u64 / 4).bits() >> (48 - 16 * (i % 4));
                ((bits & 0xff) as f64 + (bits >> 8 & 0xff) as f64 - 255.0) * RANDOM_SCALE
            };
            assert!(random("w", dtype, &shape) == dtype.encode((0..3 * 70_001).map(element)), "{dtype}");
        }
    }
}
