//! The model that is compiled into the program, so that every command works before anything is downloaded.

/// The files of a model as parts of the program.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddedModel {
    /// Its name.
    pub name: &'static str,
    /// The text of `config.json`.
    pub config: &'static str,
    /// The bytes of `model.safetensors`; not aligned.
    pub weights: &'static [u8],
    /// The text of `tokenizer.json`.
    pub tokenizer: &'static str,
    /// The text of `tokenizer_config.json`.
    pub tokenizer_config: &'static str,
    /// The first 200 tokens, as text, that the model gives after the begin token alone when it always takes the
    /// most likely one. The newline at the end is the file's.
    pub expected_greedy: &'static str,
}

/// A Llama of 260 thousand parameters that tells children's stories. See the README.md beside its files for where it
/// comes from and its licence.
pub static STORIES_260K: EmbeddedModel = EmbeddedModel {
    name: "stories260K",
    config: include_str!("../../../models/stories260K/config.json"),
    weights: include_bytes!("../../../models/stories260K/model.safetensors"),
    tokenizer: include_str!("../../../models/stories260K/tokenizer.json"),
    tokenizer_config: include_str!("../../../models/stories260K/tokenizer_config.json"),
    expected_greedy: include_str!("../../../models/stories260K/expected_greedy.txt"),
};
