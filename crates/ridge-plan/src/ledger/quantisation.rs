//! How the matrices of a served model are stored.

use ridge_graph::format::{CodeType, ScaledFormat};
use ridge_graph::shard::Placement;
use ridge_graph::{Arg, DType, FormatRef, Role, Shape, Type};
use ridge_hw::spec::Precision;
use ridge_models::{BuildOptions, ModelConfig, WeightSource, parallel};
use serde::Serialize;

use crate::error::PlanError;
use crate::reading::OpWork;

/// How the matrices are stored. Embeddings, head and norms stay in 16 bits, except in [`Quantisation::File`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantisation {
    /// 16 bits.
    Bf16,
    /// 8-bit floats with a scale a tensor or block of 128 x 128.
    Fp8,
    /// 8-bit integers with a 16-bit scale for 32 elements.
    Q8,
    /// 4-bit integers with 16-bit scale and 16-bit zero point for 128 elements.
    Int4,
    /// 4-bit floats with an 8-bit scale for 16 elements (NVFP4).
    Nvfp4,
    /// 4-bit floats with an 8-bit scale for 32 elements (MXFP4).
    Mxfp4,
    /// In the blocks of one of GGUF's formats.
    Blocks {
        /// Its name.
        format: &'static str,
        /// Bits of an element, scales included.
        bits: f64,
    },
    /// As a file stores them, each in a format of its own.
    File {
        /// Bits of an element of the layers' matrices, on average.
        matrices: f64,
        /// The same of experts.
        experts: f64,
        /// The same of what is in no layer: embedding, head and the last norm.
        ends: f64,
        /// The same of what tensor parallelism does not divide: norms, routers, projections to latents.
        whole: f64,
        /// What products multiply: 8-bit floats or integers where the layers' weights are published in them.
        precision: Precision,
    },
}

/// GGUF's formats of blocks that are planned by name; `q8` and `mxfp4` are the others.
const BLOCKS: [&str; 12] =
    ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"];

impl Quantisation {
    /// Those that plans compare, with their names.
    pub const ALL: [(&'static str, Self); 6] = [
        ("bf16", Self::Bf16),
        ("fp8", Self::Fp8),
        ("q8", Self::Q8),
        ("int4", Self::Int4),
        ("nvfp4", Self::Nvfp4),
        ("mxfp4", Self::Mxfp4),
    ];

    /// Bits of an element of a layer's matrix, scales included.
    pub fn bits(self) -> f64 {
        match self {
            Self::Bf16 => 16.0,
            Self::Fp8 => 8.0,
            Self::Q8 => 8.5,
            Self::Int4 | Self::Mxfp4 => 4.25,
            Self::Nvfp4 => 4.5,
            Self::Blocks { bits, .. } | Self::File { matrices: bits, .. } => bits,
        }
    }

    /// Bits of an element of an expert's matrix, scales included.
    pub fn bits_of_experts(self) -> f64 {
        if let Self::File { experts, .. } = self { experts } else { self.bits() }
    }

    /// Bits of an element of the weight of `op`.
    pub fn bits_of_op(self, op: &OpWork) -> f64 {
        if op.experts > 0 { self.bits_of_experts() } else { self.bits() }
    }

    /// Bits of an element of embedding and head.
    pub fn bits_of_ends(self) -> f64 {
        if let Self::File { ends, .. } = self { ends } else { 16.0 }
    }

    /// Bits of an element of what tensor parallelism does not divide.
    pub fn bits_of_whole(self) -> f64 {
        if let Self::File { whole, .. } = self { whole } else { 16.0 }
    }

    /// [`bits`](Self::bits), with those of experts if they differ, [`bits_of_ends`](Self::bits_of_ends) and
    /// [`bits_of_whole`](Self::bits_of_whole) as they are shown.
    pub fn bits_shown(self) -> [String; 3] {
        let bits = [self.bits(), self.bits_of_experts(), self.bits_of_ends(), self.bits_of_whole()];
        let [matrices, experts, ends, whole] = bits.map(|bits| {
            let text = format!("{bits:.4}");
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        });
        let of_layers = if experts == matrices { matrices } else { format!("{experts} (experts) and {matrices}") };
        [of_layers, ends, whole]
    }

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Blocks { format, .. } => format,
            Self::File { .. } => "the file's",
            _ => Self::ALL.iter().find(|(_, q)| *q == self).map_or("", |(name, _)| name),
        }
    }

    /// The one called `name`.
    ///
    /// # Errors
    /// [`PlanError::Setting`] with the names there are.
    pub fn find(name: &str) -> Result<Self, PlanError> {
        let plain = Self::ALL.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, q)| *q);
        let blocks = || {
            let format = BLOCKS.iter().find(|n| n.eq_ignore_ascii_case(name))?;
            Some(Self::Blocks { format, bits: bits_of(&FormatRef::from_name(format)?) })
        };
        plain.or_else(blocks).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|(n, _)| *n).chain(BLOCKS).collect();
            PlanError::setting("weights", name, "is not a known format", format!("choose one of {}", names.join(", ")))
        })
    }

    /// That in which `source` has the weights of the model of `config`; `None` where all are plain, in 16 bits or as a configuration
    /// names them.
    ///
    /// # Errors
    /// When the weights cannot be in the formats that the configuration names, or are not the tensors of a checkpoint.
    pub fn of_source(config: &ModelConfig, source: &WeightSource) -> Result<Option<Self>, PlanError> {
        let model = config.build(&BuildOptions::default()).map_err(|e| PlanError::Graph(e.to_string()))?;
        let graph = source.retype(&model.module.graph, None)?;
        let counted = matches!(source, WeightSource::Checkpoint(_));
        let plain = |arg: &Arg| arg.ty.format.is_none() && (!counted || arg.ty.dtype.size_bytes() == 2);
        if graph.args(Role::Weight).all(plain) {
            return Ok(None);
        }
        let number = |poly: ridge_graph::Poly| poly.as_const().map_or(0, |n| n as usize);
        let codes =
            graph.args(Role::Weight).find_map(|arg| Some(arg.ty.format.as_ref()?.downcast::<ScaledFormat>()?.codes));
        let precision = match codes {
            Some(CodeType::F8E4M3 | CodeType::F8E5M2) => Precision::Fp8,
            Some(CodeType::Int8) => Precision::Int8,
            // Others are decoded to 16 bits before they are multiplied.
            None => Precision::Bf16,
        };
        // As plans read the weights of layers.
        let kind = |arg: &Arg| match (is_of_layer(&arg.name), arg.ty.shape.rank()) {
            (false, _) => TensorKind::Ends,
            (true, 3) => TensorKind::Experts,
            (true, _) if matches!(parallel::placement(arg), Placement::Shard { .. }) => TensorKind::Matrix,
            (true, _) => TensorKind::Whole,
        };
        let tensors =
            graph.args(Role::Weight).map(|arg| (kind(arg), number(arg.ty.bytes()), number(arg.ty.shape.elements())));
        Ok(Self::of_tensors(tensors, precision))
    }

    /// That of tensors, each with its kind, bytes and elements.
    fn of_tensors(tensors: impl Iterator<Item = (TensorKind, usize, usize)>, precision: Precision) -> Option<Self> {
        let mut sums = [(0, 0); 4];
        for (kind, bytes, elements) in tensors {
            let of = &mut sums[kind as usize];
            *of = (of.0 + bytes, of.1 + elements);
        }
        let [ends, matrices, experts, whole] =
            sums.map(|(bytes, elements)| (elements > 0).then(|| 8.0 * bytes as f64 / elements as f64));
        // Some families have nothing that tensor parallelism divides.
        let matrices = matrices.or(experts).or(whole)?;
        let (ends, whole) = (ends.unwrap_or(16.0), whole.unwrap_or(16.0));
        Some(Self::File { matrices, experts: experts.unwrap_or(matrices), ends, whole, precision })
    }
}

/// What a tensor is counted with.
#[derive(Clone, Copy)]
enum TensorKind {
    Ends,
    Matrix,
    Experts,
    Whole,
}

/// Is the tensor one of a numbered layer, such as `model.layers.3.mlp.up_proj.weight`?
fn is_of_layer(name: &str) -> bool {
    name.split('.').any(|part| part.parse::<usize>().is_ok())
}

/// Bits of an element in `format`.
fn bits_of(format: &FormatRef) -> f64 {
    // A whole number of blocks of any format.
    const ELEMENTS: usize = 4096;
    let ty = Type { format: Some(format.clone()), ..Type::tensor(DType::F32, Shape::new([1, ELEMENTS])) };
    8.0 * ty.bytes().as_const().unwrap_or(0) as f64 / ELEMENTS as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_of_blocks_have_the_bits_that_they_are_known_for() {
        for (name, bits) in [("q8_0", 8.5), ("Q4_K", 4.5), ("q6_k", 6.5625), ("q2_k", 2.625), ("iq4_xs", 4.25)] {
            let found = Quantisation::find(name).unwrap();
            assert_eq!(found.bits(), bits, "{name}");
            assert_eq!(found.name(), name.to_lowercase());
        }
        for name in BLOCKS {
            assert!(Quantisation::find(name).unwrap().bits() < 9.0, "{name}");
        }
        let error = Quantisation::find("q7").unwrap_err().to_string();
        assert!(error.contains("bf16") && error.contains("q4_k"), "{error}");
        assert_eq!(Quantisation::find("fp8").unwrap().name(), "fp8");
    }
}
