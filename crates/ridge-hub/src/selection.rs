//! Selection of the files that Ridge needs.

use std::path::Path;

use ridge_files::hub::HubModel;
use wildmatch::WildMatch;

use crate::error::{HubError, Result};
use crate::listing::RemoteFile;

/// Names that are taken, and names of those that are not.
#[derive(Debug, Default)]
pub(crate) struct Patterns {
    pub(crate) include: Vec<WildMatch>,
    pub(crate) exclude: Vec<WildMatch>,
}

/// The files to download: those that the patterns name, or else what Ridge reads of the layout that the repository has.
pub(crate) fn select(model: &HubModel, files: Vec<RemoteFile>, patterns: &Patterns) -> Result<Vec<RemoteFile>> {
    let fail = |problem: String| HubError::Selection { model: model.to_string(), problem };
    let names = |files: &[&RemoteFile]| {
        const SHOWN: usize = 30;
        let names: Vec<_> = files.iter().take(SHOWN).map(|f| f.path.as_str()).collect();
        let more = files.len().saturating_sub(SHOWN);
        if more > 0 { format!("{} and {more} more", names.join(", ")) } else { names.join(", ") }
    };
    let by_name = !patterns.include.is_empty();
    let has = |name: &str| files.iter().any(|f| f.path == name);
    let has_safetensors = has("model.safetensors") || has("model.safetensors.index.json");
    let of_transformers = has("config.json")
        && (!files.iter().any(|f| is_gguf(&f.path)) || files.iter().any(|f| is_safetensors(&f.path)));
    let wanted = |file: &&RemoteFile| {
        if patterns.exclude.iter().any(|p| p.matches(&file.path)) {
            return false;
        }
        if by_name {
            return patterns.include.iter().any(|p| p.matches(&file.path));
        }
        match model.file() {
            Some(_) => chosen_part(model, &file.path),
            None if of_transformers => is_of_transformers(&file.path, has_safetensors),
            None => is_gguf(&file.path),
        }
    };
    let chosen: Vec<&RemoteFile> = files.iter().filter(wanted).collect();
    if chosen.is_empty() {
        let all: Vec<_> = files.iter().collect();
        let why =
            if by_name || model.file().is_some() { "no file matches" } else { "there are no files that Ridge reads" };
        return Err(fail(format!("{why}; its files are {}", names(&all))));
    }
    let first_parts: Vec<_> = chosen.iter().copied().filter(|f| model.chooses(&f.path)).collect();
    if !by_name && first_parts.len() > 1 {
        let problem = format!(
            "{} GGUF files match; select one by a part of its name, {}:PART: {}",
            first_parts.len(),
            model.id(),
            names(&first_parts)
        );
        return Err(fail(problem));
    }
    if !by_name && of_transformers && model.file().is_none() && !chosen.iter().any(|f| is_safetensors(&f.path)) {
        let weights = foreign_weights(&files);
        return Err(fail(format!(
            "there are no safetensors files, the only checkpoints that Ridge reads{}; --include '*.json' downloads the other files",
            if weights.is_empty() { String::new() } else { format!(" ({})", names(&weights)) }
        )));
    }
    Ok(chosen.into_iter().cloned().collect())
}

/// Is it the GGUF file that the model's name chooses, or one of its parts?
fn chosen_part(model: &HubModel, path: &str) -> bool {
    let as_first = match path.rsplit_once("-of-") {
        Some((front, behind)) if front.len() > 5 && front.is_char_boundary(front.len() - 5) => {
            format!("{}00001-of-{behind}", &front[..front.len() - 5])
        }
        _ => path.to_owned(),
    };
    model.chooses(&as_first)
}

fn is_gguf(path: &str) -> bool {
    Path::new(path).extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"))
}

fn is_safetensors(path: &str) -> bool {
    path.ends_with(".safetensors")
}

/// Weights that Ridge does not read.
fn foreign_weights(files: &[RemoteFile]) -> Vec<&RemoteFile> {
    let of = |path: &str| [".bin", ".pth", ".pt", ".h5", ".msgpack", ".onnx"].iter().any(|e| path.ends_with(e));
    files.iter().filter(|file| of(&file.path)).collect()
}

/// Is it a file of the layout that transformers and sentence-transformers read?
fn is_of_transformers(path: &str, has_safetensors: bool) -> bool {
    let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
    let text = [".json", ".jinja", ".txt", ".model"].iter().any(|e| name.ends_with(e));
    match folder {
        // Mistral's own layout of the same weights.
        "" if name.starts_with("consolidated") => !has_safetensors && name.ends_with(".safetensors"),
        "" => text || name.ends_with(".safetensors") || name.starts_with("LICENSE"),
        "additional_chat_templates" => name.ends_with(".jinja"),
        // The modules of sentence-transformers: 1_Pooling, 2_Dense.
        _ => folder.starts_with(|c: char| c.is_ascii_digit()) && (text || name.ends_with(".safetensors")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listing::Checksum;

    fn selected(model: &str, names: &[&str], include: &[&str]) -> Result<Vec<String>> {
        let file =
            |path: &&str| RemoteFile { path: (*path).to_owned(), size: 1, checksum: Checksum::GitBlob("0".to_owned()) };
        let patterns = Patterns { include: include.iter().map(|p| WildMatch::new(p)).collect(), ..Patterns::default() };
        let files = select(&model.parse().unwrap(), names.iter().map(file).collect(), &patterns)?;
        Ok(files.into_iter().map(|f| f.path).collect())
    }

    #[test]
    fn what_transformers_reads_is_taken_once() {
        let names = [
            ".gitattributes",
            "README.md",
            "LICENSE.txt",
            "config.json",
            "tokenizer.json",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "consolidated.safetensors",
            "pytorch_model.bin",
            "original/consolidated.00.pth",
            "original/params.json",
            "onnx/model.onnx",
            "onnx/config.json",
            "1_Pooling/config.json",
            "chat_template.jinja",
            "additional_chat_templates/tools.jinja",
            "model-q4.gguf",
        ];
        let taken = selected("o/n", &names, &[]).unwrap();
        let left = names.iter().filter(|n| !taken.iter().any(|t| t == *n)).copied().collect::<Vec<_>>();
        assert_eq!(
            left,
            [
                ".gitattributes",
                "README.md",
                "consolidated.safetensors",
                "pytorch_model.bin",
                "original/consolidated.00.pth",
                "original/params.json",
                "onnx/model.onnx",
                "onnx/config.json",
                "model-q4.gguf",
            ]
        );
        assert_eq!(
            selected("o/n", &names, &["*.md", "onnx/*"]).unwrap(),
            ["README.md", "onnx/model.onnx", "onnx/config.json"]
        );
        assert_eq!(selected("o/n:q4", &names, &[]).unwrap(), ["model-q4.gguf"]);
    }

    #[test]
    fn one_gguf_file_is_chosen_with_all_its_parts() {
        let names = ["README.md", "x-Q4_K_M.gguf", "x-Q8_0-00001-of-00002.gguf", "x-Q8_0-00002-of-00002.gguf"];
        let said = selected("o/n", &names, &[]).unwrap_err().to_string();
        assert!(
            said.contains("2 GGUF files match") && said.contains("o/n:PART: x-Q4_K_M.gguf, x-Q8_0-00001"),
            "{said}"
        );
        assert_eq!(selected("o/n", &["config.json", "x.gguf"], &[]).unwrap(), ["x.gguf"]);
        assert_eq!(selected("o/n:q8", &names, &[]).unwrap(), names[2..]);
        let said = selected("o/n:f16", &names, &[]).unwrap_err().to_string();
        assert!(said.contains("no file matches; its files are README.md"), "{said}");
    }

    #[test]
    fn checkpoints_that_are_not_read_are_named() {
        let said = selected("o/n", &["config.json", "pytorch_model.bin"], &[]).unwrap_err().to_string();
        assert!(said.contains("no safetensors files") && said.contains("(pytorch_model.bin)"), "{said}");
        assert_eq!(selected("o/n", &["config.json", "pytorch_model.bin"], &["*.json"]).unwrap(), ["config.json"]);
    }
}
