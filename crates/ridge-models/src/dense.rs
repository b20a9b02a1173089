//! Dense layers behind pooling, which bring a text's vector to another width (sentence-transformers' `Dense`).

use ridge_files::json;
use ridge_graph::ops::Gelu;
use ridge_graph::{Builder, DType, GraphError, Result as GraphResult, Shape, Type, Var};

use crate::config::{Fields, MAX_HIDDEN};
use crate::error::Result;

/// A layer behind pooling: `activation(x w^T + b)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DenseLayer {
    /// The folder of the model that holds its configuration and weights, such as `2_Dense`; scope of its weights.
    pub folder: String,
    /// Width of what it takes.
    pub from: usize,
    /// Width of what it gives.
    pub to: usize,
    /// Has it a bias?
    pub bias: bool,
    /// What its output goes through.
    pub activation: DenseActivation,
}

/// What the output of a [`DenseLayer`] goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenseActivation {
    /// Nothing.
    Identity,
    /// The hyperbolic tangent.
    Tanh,
    /// Zero below zero.
    Relu,
    /// `x` times the normal distribution function at `x`.
    Gelu,
    /// The logistic function.
    Sigmoid,
    /// `x` times the logistic function at `x`.
    Silu,
}

impl DenseActivation {
    /// All of them, by the names of torch's modules.
    const NAMES: [(&str, Self); 6] = [
        ("Identity", Self::Identity),
        ("Tanh", Self::Tanh),
        ("ReLU", Self::Relu),
        ("GELU", Self::Gelu),
        ("Sigmoid", Self::Sigmoid),
        ("SiLU", Self::Silu),
    ];

    fn apply(self, g: &mut Builder, x: Var) -> GraphResult<Var> {
        match self {
            Self::Identity => Ok(x),
            Self::Tanh => g.tanh(x),
            Self::Relu => {
                let zero = g.constant_like(x, 0.0)?;
                g.max(x, zero)
            }
            Self::Gelu => g.gelu(x, Gelu::Erf),
            Self::Sigmoid => g.sigmoid(x),
            Self::Silu => {
                let open = g.sigmoid(x)?;
                g.mul(x, open)
            }
        }
    }
}

impl DenseLayer {
    /// Reads the `config.json` of a module in `folder`; `name` is what errors call the file.
    ///
    /// # Errors
    /// When the file is damaged, or asks for what Ridge does not do.
    pub(crate) fn read(folder: &str, name: &str, text: &str) -> Result<Self> {
        /// What the module reads and writes if the file does not say otherwise.
        const VECTOR: &str = "sentence_embedding";
        let map = json::object(name, text.as_bytes())?;
        let mut f = Fields::new(name, &map);
        f.must_be("module_input_name", VECTOR)?;
        f.must_be("module_output_name", VECTOR)?;
        f.must_be("use_residual", false)?;
        let class: Option<&str> = f.optional("activation_function")?;
        let class = class.map_or("Tanh", |class| class.rsplit('.').next().unwrap_or_default());
        let Some((_, activation)) = DenseActivation::NAMES.iter().find(|(known, _)| *known == class) else {
            let known = DenseActivation::NAMES.map(|(known, _)| known).join(", ");
            return Err(f.wrong("activation_function", "is not supported", format!("Ridge knows {known}")));
        };
        let layer = Self {
            folder: folder.to_owned(),
            from: f.size("in_features", MAX_HIDDEN)?,
            to: f.size("out_features", MAX_HIDDEN)?,
            bias: f.optional("bias")?.unwrap_or(true),
            activation: *activation,
        };
        f.finish()?;
        Ok(layer)
    }

    /// What `x`, `[seqs, from]`, becomes: `[seqs, to]`.
    pub(crate) fn apply(&self, g: &mut Builder, x: Var) -> GraphResult<Var> {
        let width = g.ty(x)?.shape.last();
        if width.as_const() != Some(self.from) {
            let why = format!("{} takes vectors of {} elements, and is given {width}", self.folder, self.from);
            return Err(GraphError::Use { at: g.scope().into(), why });
        }
        let y = g.scoped(&format!("{}.linear", self.folder), |g| {
            let w = g.weight("weight", Type::tensor(DType::F32, Shape::new([self.to, self.from])))?;
            let shape = Shape::new([self.to]);
            let b = if self.bias { Some(g.weight("bias", Type::tensor(DType::F32, shape))?) } else { None };
            g.linear_bias(x, w, b)
        })?;
        self.activation.apply(g, y)
    }
}
