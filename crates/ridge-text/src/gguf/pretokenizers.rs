//! How texts are cut before byte-pair encoding: each name of `tokenizer.ggml.pre` stands for expressions that cut one
//! after another, what matches and what lies between alike.
//!
//! An expression that looks ahead of every digit, or every space, takes time by the square of a run of them. [`SLOW`] has
//! those that are published so, with what cuts the same and looks ahead once a run.

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

const JAIS_2: &str = contractions!(
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|(?<![^\S\r\n])\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
);

const EXAONE_MOE: &str = contractions!(
    r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
);

const BAILING: &str = r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";

const UFAKZEKA: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const MINICPM_5: &str =
    contractions!(r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+");

/// GPT-4o's with digits one by one.
const YOUTU: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Scripts of East Asia, whose runs are pieces.
const YOUTU_RUNS: &str = r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+";

/// GPT-4o's with Han apart.
const KIMI_2: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Digits by three, counted from the last: runs that end at the end of a word, then the beginning of such a run, and
/// what continues from it.
const THOUSANDS: [&str; 2] = [r"\d+\b", r"\A\d{1,3}(?=(?:\d{3})*+\z)|(?<=\d)\G\d{3}"];

/// As [`THOUSANDS`] for every run: before the first whole three, then after each that another digit follows.
const GROUPS: [&str; 2] = [r"(?<!\d{3})(?=(?:\d{3})++(?!\d))", r"\d{3}(?=\d)"];

/// Parts of published expressions, and what stands for them here.
const SLOW: [(&str, &[&str]); 3] = [
    (r"\d{1,3}(?=(?:\d{3})*\b)", &THOUSANDS),
    (r"(?=(\d{3})+(?!\d))", &GROUPS),
    // Behind white space that ends no line the rest of a run ends none: it would have been taken to there.
    (r"\s*[\r\n]+|\s{512}", &[r"(?<![^\S\r\n])\s*[\r\n]+|\s{512}"]),
];

const AFMOE_RUNS: &str = r"[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+";

const HAN_KANA: &str = r"[一-龥぀-ゟ゠-ヿ]+";

const SPARK: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"##;

/// Letters with case, as the tokenizer of DeepSeek LLM lists them.
const CASED: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";

const DEEPSEEK_LLM_MARKS: &str = r"\s?[!-/:-~！-／：-～‘-‟　-。]+";

/// Names to offer for a cut, one for each.
const NAMES: [&str; 32] = [
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
    "jais-2",
    "exaone-moe",
    "bailingmoe",
    "ufakzeka",
    "minicpm5",
    "laguna",
    "youtu",
    "kimi-k2",
    "tiny_aya",
    "granite-embed-multi-97m",
    "superbpe",
    "chameleon",
    "spark2_5",
    "afmoe",
    "deepseek-llm",
];

/// The name of the cut by `expressions`, in which a piece that is a token is taken whole or not.
pub(super) fn named(expressions: &[String], whole: bool) -> Option<&'static str> {
    let wanted: Vec<&str> = expressions.iter().map(String::as_str).collect();
    let wanted = published(&wanted);
    NAMES.into_iter().find(|name| cut(name).is_some_and(|c| c.whole == whole && published(c.expressions) == wanted))
}

/// Expressions as they are published, in one of two spellings.
fn published(expressions: &[&str]) -> Vec<String> {
    const BETWEEN: &str = "\0";
    let spellings = [("(?i:'s|'t|'re|'ve|'m|'ll|'d)", contractions!("")), (r"\p{N}{1}", r"\p{N}")];
    let mut all = expressions.join(BETWEEN);
    for (one, other) in spellings {
        all = all.replace(one, other);
    }
    for (theirs, ours) in SLOW {
        all = all.replace(&ours.join(BETWEEN), theirs);
    }
    all.split(BETWEEN).map(str::to_owned).collect()
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
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2"
        | "jina-v5-nano" => (&[LLAMA_3], true, true),
        "dbrx" | "smaug-bpe" | "chatglm-bpe" => (&[LLAMA_3], false, false),
        "glm4" | "glm5" => (&[LLAMA_3], true, false),
        "qwen2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "megrez" | "stablelm2" | "hunyuan" | "solar-open"
        | "grok-2" => (&[QWEN_2], false, false),
        "qwen35" => (&[QWEN_35], false, false),
        "tekken" => (&[TEKKEN], true, true),
        "gpt-4o" | "llama4" | "kanana2" | "talkie" | "minimax-m2" => (&[GPT_4O], false, false),
        "deepseek-v3" | "hunyuan-dense" | "joyai-llm" | "hy_v4" => {
            (&[r"\p{N}{1,3}", HAN_KANA, DEEPSEEK_3], false, false)
        }
        "spark2_5" => (&[r"\p{N}{1,3}", HAN_KANA, SPARK, r"\p{N}"], false, false),
        "afmoe" => (&[THOUSANDS[0], THOUSANDS[1], AFMOE_RUNS, DEEPSEEK_3], false, false),
        "deepseek-llm" => {
            (&[r"[\r\n]", CASED, DEEPSEEK_LLM_MARKS, r"\s+$", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}+"], false, false)
        }
        "jais-2" => (&[JAIS_2], false, false),
        "exaone-moe" => (&[EXAONE_MOE], false, false),
        "bailingmoe" | "bailingmoe2" | "llada-moe" => (&[BAILING], false, false),
        "ufakzeka" => (&[UFAKZEKA], false, false),
        "minicpm5" => (&[r"\p{N}{1,3}", MINICPM_5], true, false),
        "laguna" => (&[r"[^\n]+|\n+", QWEN_2], false, false),
        "youtu" => (&[YOUTU_RUNS, YOUTU], true, false),
        "kimi-k2" => (&[KIMI_2], false, false),
        "tiny_aya" | "cohere2moe" => (&[THOUSANDS[0], THOUSANDS[1], GPT_4O], false, false),
        "granite-embed-multi-97m" => (&[GPT_4O], true, false),
        "superbpe" => (&[r"\p{N}+", GROUPS[0], GROUPS[1]], false, false),
        "chameleon" => (
            &[
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                GPT_2,
            ],
            false,
            true,
        ),
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

#[cfg(test)]
mod tests {
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior};

    use super::*;

    /// SplitMix64, for texts that are the same in every run.
    struct SplitMix(u64);

    impl SplitMix {
        /// A number in `0..n`.
        fn below(&mut self, n: usize) -> usize {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) % n as u64) as usize
        }
    }

    fn splits<T: AsRef<str>>(expressions: &[T]) -> Vec<Split> {
        let split = |e: &T| {
            let pattern = SplitPattern::Regex(e.as_ref().to_owned());
            Split::new(pattern, SplitDelimiterBehavior::Isolated, false).expect("is an expression")
        };
        expressions.iter().map(split).collect()
    }

    /// Where `text` is cut.
    fn ends(splits: &[Split], text: &str) -> Vec<usize> {
        let mut pieces = PreTokenizedString::from(text);
        splits.iter().for_each(|split| split.pre_tokenize(&mut pieces).expect("cuts"));
        pieces.get_splits(OffsetReferential::Original, OffsetType::Byte).iter().map(|(_, at, _)| at.1).collect()
    }

    #[test]
    fn what_stands_for_a_slow_expression_cuts_as_it_does() {
        let symbols: Vec<char> = "12345٥½²a_b.\u{301} \t\n\r".chars().collect();
        let mut seen = 0;
        for name in NAMES {
            let ours = cut(name).expect("is a name").expressions;
            let theirs = published(ours);
            if theirs.len() == ours.len() && !theirs.concat().contains(r"\s{512}") {
                continue;
            }
            seen += 1;
            let (theirs, ours) = (splits(&theirs), splits(ours));
            let mut rng = SplitMix(5);
            for nth in 0..3000 {
                let among = [5, 9, symbols.len()][nth % 3];
                let mut text = String::new();
                for _ in 0..rng.below(12) {
                    let (symbol, times) = (symbols[rng.below(among)], 1 + rng.below(8));
                    text.extend(std::iter::repeat_n(symbol, times));
                }
                assert_eq!(ends(&ours, &text), ends(&theirs, &text), "{name}: {text:?}");
            }
        }
        assert_eq!(seen, 4, "tiny_aya, superbpe, afmoe and jais-2");
    }

    /// A run of one symbol, which would take minutes by the square of its length.
    #[test]
    fn a_long_run_of_digits_or_spaces_is_cut_as_soon_as_any_text() {
        for name in NAMES {
            let splits = splits(cut(name).expect("is a name").expressions);
            for (symbol, end) in [("1", ""), (" ", "a")] {
                let text = symbol.repeat(400_000) + end;
                assert_eq!(ends(&splits, &text).last(), Some(&text.len()), "{name}");
            }
        }
    }
}
