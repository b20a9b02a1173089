//! The graph of classifiers of ViT's build (Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words: Transformers for Image
//! Recognition at Scale", section 3.1): an image is cut into patches, which are the tokens of an encoder, with a token of
//! its own for the class.

use ridge_files::Checkpoint;
use ridge_graph::ops::Gelu;
use ridge_graph::{Builder, DType, Dim, Result as GraphResult, Type, Var};

use super::blocks::{NormKind, ResidualHalf, linear, weight};
use super::encoder::{QUERY_KEY_VALUE, attend, project};
use crate::model::{BuildOptions, ImageClassifier, symbols};
use crate::module::Module;

const CLASS: &str = "vit.embeddings.cls_token";
const POSITIONS: &str = "vit.embeddings.position_embeddings";
const PATCHES: &str = "vit.embeddings.patch_embeddings.projection";

/// Every size and switch of a ViT that classifies images.
#[derive(Clone, Debug, PartialEq)]
pub struct VitConfig {
    /// The `model_type` of its configuration.
    pub family: &'static str,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Heads of each layer; they divide the width.
    pub num_attention_heads: usize,
    /// Height and width of an image, in pixels; patches divide them.
    pub image_size: [usize; 2],
    /// Height and width of a patch, in pixels.
    pub patch_size: [usize; 2],
    /// Channels of an image.
    pub num_channels: usize,
    /// Added to the variance inside every norm.
    pub norm_eps: f64,
    /// Activation of the MLP.
    pub activation: Gelu,
    /// Do the projections to queries, keys and values have a bias?
    pub qkv_bias: bool,
    /// Names of the classes, in the order of the logits.
    pub labels: Vec<String>,
    /// The dtype the weights were published in, if the file says.
    pub torch_dtype: Option<DType>,
}

impl VitConfig {
    /// Positions of an image: its patches and the class token.
    pub fn positions(&self) -> usize {
        1 + self.patches().iter().product::<usize>()
    }

    /// Patches from top to bottom, and from left to right.
    fn patches(&self) -> [usize; 2] {
        [0, 1].map(|axis| self.image_size[axis] / self.patch_size[axis])
    }

    /// Elements of a patch.
    fn patch_elements(&self) -> usize {
        self.num_channels * self.patch_size[0] * self.patch_size[1]
    }

    /// Builds the graph of the classifier, with every weight as plain f32.
    ///
    /// # Errors
    /// A mistake of ours: the configuration has been checked.
    pub fn build(&self, options: &BuildOptions) -> GraphResult<ImageClassifier> {
        let mut g = Builder::new();
        let images = Dim::sym(symbols::IMAGES);
        let tokens = images.clone() * self.positions() as i64;
        let [height, width] = self.image_size;
        let shape = [images.clone(), self.num_channels.into(), height.into(), width.into()];
        let pixels = g.step_input("pixel_values", Type::tensor(DType::F32, shape))?;
        let patches = self.embed_patches(&mut g, pixels, options)?;
        let class = self.look_up(&mut g, CLASS, 1, &images, options)?;
        let joined = g.concat(&[class, patches], 1)?;
        let places = self.look_up(&mut g, POSITIONS, self.positions(), &images, options)?;
        let x = g.add(joined, places)?;
        let mut x = g.reshape(x, [tokens.clone(), self.hidden_size.into()])?;
        // The tokens of an image are a sequence.
        let image = g.iota([images.clone(), self.positions().into()], 0, DType::I32)?;
        let seq_ids = g.reshape(image, [&tokens])?;

        let layer = g.function("vit_layer", |g| {
            let x = g.arg("x", Type::tensor(options.activations, [tokens.clone(), self.hidden_size.into()]));
            let seq_ids = g.arg("seq_ids", Type::tensor(DType::I32, [&tokens]));
            Ok(vec![self.layer(g, x, seq_ids)?])
        })?;
        for index in 0..self.num_hidden_layers {
            x = g.scoped(&format!("vit.encoder.layer.{index}"), |g| g.call(layer, &[x, seq_ids]))?[0];
        }
        let x = NormKind::Layer(self.norm_eps).apply(&mut g, "vit.layernorm", x)?;
        let hidden = g.reshape(x, [images.clone(), self.positions().into(), self.hidden_size.into()])?;
        let class = g.slice(hidden, 1, 0, 1)?;
        let class = g.reshape(class, [images, self.hidden_size.into()])?;
        let logits = linear(&mut g, "classifier", class, self.labels.len(), true)?;
        let [hidden, logits] = [g.cast(hidden, DType::F32)?, g.cast(logits, DType::F32)?];
        Ok(ImageClassifier {
            module: Module {
                family: self.family,
                graph: g.finish(vec![("logits".into(), logits), ("hidden".into(), hidden)])?,
                state_groups: Vec::new(),
                shares: None,
                activations: options.activations,
            },
            channels: self.num_channels,
            size: self.image_size,
            positions: self.positions(),
            labels: self.labels.clone(),
        })
    }

    /// The patches of `pixels` through a matrix: `[images, patches, hidden]`. What is published as a convolution whose
    /// windows do not overlap.
    fn embed_patches(&self, g: &mut Builder, pixels: Var, options: &BuildOptions) -> GraphResult<Var> {
        let images = g.ty(pixels)?.shape.0[0].clone();
        let ([down, across], [height, width]) = (self.patches(), self.patch_size);
        let channels = self.num_channels.into();
        let shape = [images.clone(), channels, down.into(), height.into(), across.into(), width.into()];
        let cut = g.reshape(pixels, shape)?;
        let ordered = g.transpose(cut, &[0, 2, 4, 1, 3, 5])?;
        let flat = g.reshape(ordered, [images.clone() * (down * across) as i64, self.patch_elements().into()])?;
        let flat = g.cast(flat, options.activations)?;
        let x = linear(g, PATCHES, flat, self.hidden_size, true)?;
        g.reshape(x, [images, (down * across).into(), self.hidden_size.into()])
    }

    /// For each image the whole table of this name, of `rows` rows: `[images, rows, hidden]`.
    fn look_up(
        &self,
        g: &mut Builder,
        name: &str,
        rows: usize,
        images: &Dim,
        options: &BuildOptions,
    ) -> GraphResult<Var> {
        let (scope, name) = name.rsplit_once('.').unwrap_or(("", name));
        let row = g.iota([images.clone(), rows.into()], 1, DType::I32)?;
        let row = g.reshape(row, [images.clone() * rows as i64])?;
        let x = g.scoped(scope, |g| {
            let table = weight(g, name, [rows, self.hidden_size])?;
            g.embedding(table, row, options.activations)
        })?;
        g.reshape(x, [images.clone(), rows.into(), self.hidden_size.into()])
    }

    fn layer(&self, g: &mut Builder, x: Var, seq_ids: Var) -> GraphResult<Var> {
        let norm = NormKind::Layer(self.norm_eps);
        let x = ResidualHalf::before(norm, "layernorm_before").add(g, x, "attention", |g, x| {
            let heads = self.num_attention_heads;
            let qkv = g.scoped("attention", |g| project(g, x, QUERY_KEY_VALUE, heads, self.qkv_bias))?;
            let a = attend(g, qkv, seq_ids, None)?;
            linear(g, "output.dense", a, self.hidden_size, true)
        })?;
        let h = norm.apply(g, "layernorm_after", x)?;
        let h = linear(g, "intermediate.dense", h, self.intermediate_size, true)?;
        let h = g.gelu(h, self.activation)?;
        let h = linear(g, "output.dense", h, self.hidden_size, true)?;
        g.add(x, h)
    }

    /// A published checkpoint with the shapes that the graph's weights have.
    pub fn arrange(&self, checkpoint: Checkpoint) -> Checkpoint {
        let matrices = [
            (CLASS.to_owned(), [1, self.hidden_size]),
            (POSITIONS.to_owned(), [self.positions(), self.hidden_size]),
            (format!("{PATCHES}.weight"), [self.hidden_size, self.patch_elements()]),
        ];
        // What a model that was trained by masking or with a pooler has besides.
        let checkpoint = checkpoint.without(&["vit.pooler.*", "vit.embeddings.mask_token"]);
        matrices.into_iter().fold(checkpoint, |all, (name, shape)| all.reshaped(&name, &shape))
    }
}
