//! How texts are cut before byte-pair encoding: each name of `tokenizer.ggml.pre` stands for expressions that cut one
//! after another, what matches and what lies between alike.

/// How a kind of tokenizer cuts.
pub(super) struct Cut {
    /// Regular expressions.
    pub(super) expressions: &'static [&'static str],
    /// Is a piece that is a token taken whole, whatever the merges say?
    pub(super) whole: bool,
    /// Does a text begin with the begin token unless the file says otherwise?
    pub(super) bos: bool,
}

pub(super) const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

macro_rules! contractions {
    ($rest:literal) => {
        concat!("(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", $rest)
    };
}

const LLAMA_3: &str =
    contractions!(r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+");

const QWEN_2: &str =
    contractions!(r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+");

const QWEN_35: &str =
    contractions!(r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+");

const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const GPT_4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const DEEPSEEK_3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

const SEED_CODER: &str =
    contractions!(r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+");

const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

/// Names to offer for a cut, one for each.
const NAMES: [&str; 17] = [
    "gpt-2",
    "starcoder",
    "llama-bpe",
    "dbrx",
    "glm4",
    "qwen2",
    "qwen35",
    "tekken",
    "gpt-4o",
    "deepseek-v3",
    "deepseek-coder",
    "falcon",
    "seed-coder",
    "bloom",
    "viking",
    "default",
    "smollm",
];

/// The name of the cut by `expressions`, in which a piece that is a token is taken whole or not.
pub(super) fn named(expressions: &[String], whole: bool) -> Option<&'static str> {
    // Two spellings of one expression.
    let plain =
        |text: &str| text.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", contractions!("")).replace(r"\p{N}{1}", r"\p{N}");
    let wanted: Vec<String> = expressions.iter().map(|e| plain(e)).collect();
    NAMES.into_iter().find(|name| {
        cut(name).is_some_and(|cut| {
            let same = cut.expressions.iter().map(|e| plain(e)).eq(wanted.iter().cloned());
            cut.whole == whole && same
        })
    })
}

/// The cut called `name`.
pub(super) fn cut(name: &str) -> Option<Cut> {
    let (expressions, whole, bos): (&[&str], bool, bool) = match name {
        "gpt-2" | "phi-2" | "jina-es" | "jina-de" | "jina-v1-en" | "jina-v2-es" | "jina-v2-de" | "jina-v2-code"
        | "roberta-bpe" | "gigachat" | "a.x-4.0" | "mellum" | "modern-bert" | "mpt" | "olmo" | "jais" | "trillion"
        | "granite-docling" | "exaone4" => (&[GPT_2], false, false),
        "starcoder" | "refact" | "command-r" | "smollm" | "codeshell" | "exaone" | "minerva-7b" | "mellum2" => {
            (&[r"\p{N}", GPT_2], false, false)
        }
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2" => {
            (&[LLAMA_3], true, true)
        }
        "dbrx" | "smaug-bpe" | "chatglm-bpe" => (&[LLAMA_3], false, false),
        "glm4" | "glm5" => (&[LLAMA_3], true, false),
        "qwen2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "megrez" | "stablelm2" | "hunyuan" | "solar-open"
        | "grok-2" => (&[QWEN_2], false, false),
        "qwen35" => (&[QWEN_35], false, false),
        "tekken" => (&[TEKKEN], true, true),
        "gpt-4o" | "llama4" | "kanana2" | "talkie" | "minimax-m2" => (&[GPT_4O], false, false),
        "deepseek-v3" | "hunyuan-dense" | "joyai-llm" => {
            (&[r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_3], false, false)
        }
        "deepseek-coder" => (&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"], false, false),
        "falcon" => (&[r"[\p{P}\$\+<=>\^~\|`]+", GPT_2, "[0-9][0-9][0-9]"], false, false),
        "seed-coder" => (&[SEED_CODER], false, false),
        "bloom" | "poro-chat" | "gpt3-finnish" => (&[BLOOM], false, false),
        "viking" => (&[BLOOM, r"\p{N}"], false, false),
        "default" => (&[r"[\p{P}\$\+<=>\^~\|]+", GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"], false, false),
        _ => return None,
    };
    Some(Cut { expressions, whole, bos })
}
