//! How the vectors of a text's tokens become one, as metadata says.

use ridge_files::Gguf;

use super::config::POOLINGS;
use crate::error::Result;
use crate::pooling::Pooling;

/// How the vectors of a text's tokens become one, if the metadata of `gguf` says.
///
/// # Errors
///
/// [`ModelError::Files`](crate::ModelError::Files) if it names a way that Ridge does not do.
pub fn pooling(gguf: &Gguf) -> Result<Option<Pooling>> {
    let Some(architecture) = gguf.text("general.architecture")? else { return Ok(None) };
    let key = format!("{architecture}.pooling_type");
    match gguf.int(&key)? {
        None | Some(0) => Ok(None),
        Some(number) => match POOLINGS.iter().find(|(n, _)| u64::from(*n) == number) {
            Some((_, pooling)) => Ok(Some(*pooling)),
            None => {
                let problem = format!("{key} = {number} is a way of pooling that Ridge does not do");
                let remedy = "choose a model that pools by mean, cls or last token, or say --pooling";
                Err(gguf.fail(problem, remedy).into())
            }
        },
    }
}
