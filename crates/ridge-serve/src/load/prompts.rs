//! Prompts of so many tokens, the same for the same seed.

use std::path::Path;

use ridge_graph::sample::Rng;
use ridge_text::Tokenizer;

use super::error::LoadError;
use super::workload::RequestShape;

/// The ids that random prompts are made of begin here: the first few are special in many vocabularies.
const FIRST_ID: u32 = 3;
/// How often a text is cut or prolonged to have as many tokens as it should.
const TRIES: usize = 8;

/// Where the words of prompts come from.
#[derive(Debug)]
pub enum PromptSource {
    /// Ids below this one, at random.
    Ids(u32),
    /// Common words at random.
    Common,
    /// A text, from a random word of it on.
    Corpus(String),
}

/// Makes prompts.
#[derive(Debug)]
pub struct PromptGenerator {
    words: PromptSource,
    tokenizer: Option<Tokenizer>,
    seed: u64,
    /// Tokens at the beginning of every prompt that are the same in all.
    shared: usize,
    /// Tokens that a block of a trace stands for.
    block: usize,
    /// Offsets of the corpus' words.
    starts: Vec<usize>,
}

/// A prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GeneratedPrompt {
    /// As ids of tokens.
    Ids(Vec<u32>),
    /// As a text.
    Text(String),
}

/// Some of the commonest words of English, which most tokenizers have as one token each.
const COMMON: [&str; 48] = [
    "the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with", "his",
    "they", "at", "be", "this", "have", "from", "or", "one", "had", "by", "word", "but", "not", "what", "all", "were",
    "we", "when", "your", "can", "said", "there", "use", "an", "each", "which", "she", "do", "how", "their", "if",
];

impl PromptGenerator {
    /// Prompts whose first `shared` tokens are the same in all. A block of a trace has `block` tokens. With a tokenizer,
    /// texts have exactly as many tokens as asked where that is possible; without, as many words.
    ///
    /// # Errors
    /// A corpus without words.
    pub fn new(
        words: PromptSource,
        tokenizer: Option<Tokenizer>,
        seed: u64,
        shared: usize,
        block: usize,
    ) -> Result<Self, LoadError> {
        let mut starts = Vec::new();
        if let PromptSource::Corpus(text) = &words {
            let inside = text.char_indices().scan(true, |space, (at, c)| {
                let begins = *space && !c.is_whitespace();
                *space = c.is_whitespace();
                Some((begins, at))
            });
            starts = inside.filter_map(|(begins, at)| begins.then_some(at)).collect();
            if starts.is_empty() {
                let problem = "has no words to make prompts of".to_owned();
                return Err(LoadError::Data { place: "the corpus".to_owned(), problem });
            }
        }
        Ok(Self { words, tokenizer, seed, shared, block: block.max(1), starts })
    }

    /// The text of a file, for [`PromptSource::Corpus`].
    ///
    /// # Errors
    /// A file that cannot be read or is not UTF-8.
    pub fn corpus(path: &Path) -> Result<PromptSource, LoadError> {
        let name = path.display().to_string();
        let bytes = std::fs::read(path).map_err(|cause| LoadError::Read { path: name.clone(), cause })?;
        let text = String::from_utf8(bytes).map_err(|error| LoadError::Data {
            place: name,
            problem: format!("is not UTF-8 at byte {}; save it as UTF-8", error.utf8_error().valid_up_to()),
        })?;
        Ok(PromptSource::Corpus(text))
    }

    /// Do prompts have exactly as many tokens as asked?
    pub fn exact(&self) -> bool {
        matches!(self.words, PromptSource::Ids(_)) || self.tokenizer.is_some()
    }

    /// The prompt of the request of this number.
    pub fn make(&self, number: u64, shape: &RequestShape) -> GeneratedPrompt {
        let parts = self.parts(number, shape);
        match &self.words {
            PromptSource::Ids(end) => {
                let span = end.saturating_sub(FIRST_ID).max(1) as usize;
                let ids = parts
                    .into_iter()
                    .flat_map(|(mut rng, tokens)| (0..tokens).map(move |_| FIRST_ID + rng.below(span) as u32));
                GeneratedPrompt::Ids(ids.collect())
            }
            _ => {
                let mut text = String::new();
                for (mut rng, tokens) in parts {
                    self.say(&mut text, &mut rng, tokens);
                }
                GeneratedPrompt::Text(match &self.tokenizer {
                    Some(tokenizer) => self.fitted(tokenizer, text, number, shape.prompt_tokens),
                    None => text,
                })
            }
        }
    }

    /// What a prompt is made of: generators, and how many tokens each gives.
    fn parts(&self, number: u64, shape: &RequestShape) -> Vec<(Rng, usize)> {
        let mut left = shape.prompt_tokens;
        let mut parts = Vec::with_capacity(shape.blocks.len() + 2);
        let mut part = |kind: u64, which: u64, tokens: usize| {
            let tokens = tokens.min(left);
            left -= tokens;
            if tokens > 0 {
                let seed = Rng::new(self.seed ^ (kind << 62)).bits() ^ which;
                parts.push((Rng::new(Rng::new(seed).bits()), tokens));
            }
        };
        part(0, 0, self.shared);
        for block in &shape.blocks {
            part(1, *block, self.block);
        }
        part(2, number, usize::MAX);
        parts
    }

    fn say(&self, text: &mut String, rng: &mut Rng, words: usize) {
        let mut at = rng.below(self.starts.len());
        for _ in 0..words {
            if !text.is_empty() {
                text.push(' ');
            }
            match &self.words {
                PromptSource::Corpus(corpus) => {
                    text.extend(corpus[self.starts[at]..].split_whitespace().next());
                    at = (at + 1) % self.starts.len();
                }
                _ => text.push_str(COMMON[rng.below(COMMON.len())]),
            }
        }
    }

    /// A text that begins as `text` and has `tokens` tokens, or nearly so many where the tokenizer lets none have them.
    fn fitted(&self, tokenizer: &Tokenizer, mut text: String, number: u64, tokens: usize) -> String {
        let mut rng = Rng::new(self.seed ^ number ^ 0x66_6974);
        for _ in 0..TRIES {
            let Ok(offsets) = tokenizer.encode_with_offsets(&text, false) else { break };
            match offsets.len() {
                n if n == tokens => break,
                n if n > tokens => text.truncate(offsets[tokens].1.start),
                n => self.say(&mut text, &mut rng, tokens - n),
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(prompt_tokens: usize, blocks: &[u64]) -> RequestShape {
        RequestShape { prompt_tokens, output_tokens: 1, blocks: blocks.to_vec(), at: None }
    }

    fn ids(prompts: &PromptGenerator, number: u64, shape: &RequestShape) -> Vec<u32> {
        match prompts.make(number, shape) {
            GeneratedPrompt::Ids(ids) => ids,
            GeneratedPrompt::Text(text) => panic!("{text}"),
        }
    }

    fn common(a: &[u32], b: &[u32]) -> usize {
        a.iter().zip(b).take_while(|(a, b)| a == b).count()
    }

    #[test]
    fn prompts_share_what_their_blocks_share() {
        let prompts = PromptGenerator::new(PromptSource::Ids(500), None, 1, 0, 16).unwrap();
        let of = |number, tokens, blocks: &[u64]| ids(&prompts, number, &shape(tokens, blocks));
        let (a, b, c) = (of(0, 60, &[7, 8, 9, 10]), of(1, 60, &[7, 8, 11, 12]), of(2, 40, &[8, 7]));
        assert_eq!((a.len(), b.len(), c.len()), (60, 60, 40));
        assert_eq!(common(&a, &b), 32);
        assert_eq!((&a[..16], &a[16..32]), (&c[16..32], &c[..16]));
        assert!(common(&of(3, 64, &[]), &of(4, 64, &[])) < 3);
        assert_eq!(of(3, 64, &[]), of(3, 64, &[]));
        assert!(a.iter().chain(&b).all(|id| (3..500).contains(id)));
    }

    #[test]
    fn a_shared_beginning_is_in_every_prompt_and_another_seed_has_another() {
        let with = |seed| PromptGenerator::new(PromptSource::Ids(500), None, seed, 20, 512).unwrap();
        let (a, b) = (ids(&with(1), 0, &shape(50, &[])), ids(&with(1), 1, &shape(50, &[])));
        assert!((20..23).contains(&common(&a, &b)));
        assert_eq!(ids(&with(1), 0, &shape(7, &[])), a[..7]);
        assert!(common(&a, &ids(&with(2), 0, &shape(50, &[]))) < 3);
    }

    #[test]
    fn texts_have_as_many_tokens_as_asked() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stories260K/tokenizer.json");
        let tokenizer = Tokenizer::from_file(&path).unwrap();
        let corpus = "Once upon a time, a girl had a red ball.\n\n  She threw it far away over the fence! ";
        for words in [PromptSource::Common, PromptSource::Corpus(corpus.to_owned())] {
            let prompts = PromptGenerator::new(words, Some(Tokenizer::from_file(&path).unwrap()), 3, 0, 512).unwrap();
            for (number, tokens) in [1, 2, 17, 128, 300].into_iter().enumerate() {
                let GeneratedPrompt::Text(text) = prompts.make(number as u64, &shape(tokens, &[])) else {
                    panic!("ids")
                };
                assert_eq!(tokenizer.encode(&text, false).unwrap().len(), tokens, "{text:?}");
            }
        }
    }

    #[test]
    fn without_a_tokenizer_words_are_counted() {
        let prompts =
            PromptGenerator::new(PromptSource::Corpus(" ein Wort\nund noch eines ".to_owned()), None, 0, 0, 512)
                .unwrap();
        let GeneratedPrompt::Text(text) = prompts.make(0, &shape(12, &[])) else { panic!("ids") };
        assert_eq!(text.split(' ').count(), 12);
        assert!(text.contains("Wort und noch eines ein"), "{text}");
        assert!(PromptGenerator::new(PromptSource::Corpus(" \n".to_owned()), None, 0, 0, 512).is_err());
    }
}
