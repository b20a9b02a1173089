//! Serving: aggregated runs of TensorRT-LLM, vLLM and SGLang.

use std::path::Path;

use super::Section;

pub(super) fn sections(_folder: &Path, _configs: &Path) -> Result<Vec<Section>, String> {
    Ok(Vec::new())
}
