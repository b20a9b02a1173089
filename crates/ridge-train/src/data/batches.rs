//! Sequences of a fixed number of tokens, in an order that depends on seed and number alone, as the inputs of a step.

use std::sync::atomic::AtomicBool;

use serde::{Deserialize, Serialize};

use super::documents::{DocumentFile, FileKind, files_of};
use super::order::{Permutation, mix, next_source};
use super::tokens::{ShardIndex, Tokens};
use super::vocabulary::{Vocabulary, VocabularyChoice};
use crate::error::{Result, TrainError};
use crate::settings::{DataSettings, Packing};
use crate::stop::check_stop;

/// What is trained on and what losses are measured on, as tokens.
pub struct Corpus {
    /// What makes texts of them.
    pub vocabulary: Vocabulary,
    /// Each of `data.train`, without what is set aside.
    pub train: Vec<Tokens>,
    /// The share of each.
    pub shares: Vec<f64>,
    /// What losses are measured on; may be empty.
    pub validation: Tokens,
}

/// A source before its tokens are made.
enum Source {
    Texts(Vec<DocumentFile>),
    Tokens(Tokens),
}

impl Corpus {
    /// Reads all data. `tokenizer` is the vocabulary of the model that is trained on, for settings that name none.
    ///
    /// # Errors
    /// When a file cannot be read, has no tokens, or does not fit the vocabulary; [`TrainError::Stopped`] when `stop` is set
    /// meanwhile.
    pub fn read(settings: &DataSettings, tokenizer: Option<Vocabulary>, stop: &AtomicBool) -> Result<Self> {
        let open_one = |path: &std::path::PathBuf| check_stop(stop).and_then(|()| Source::open(path));
        let open = |paths: &[std::path::PathBuf]| paths.iter().map(open_one).collect::<Result<Vec<_>>>();
        let (train, validation) = (open(&settings.train)?, open(&settings.validation)?);
        let vocabulary = vocabulary(settings, tokenizer, &train, &validation, stop)?;
        let tokens = |source: &Source, key: &str, path: &std::path::Path| {
            let tokens = source.tokens(&vocabulary, &settings.text_field, stop)?;
            if tokens.is_empty() {
                return Err(TrainError::path(path, "it has no tokens", format!("take it out of {key}, or fill it")));
            }
            let largest = tokens.largest() as usize;
            if largest >= vocabulary.size() {
                let problem = format!("it has the token {largest}, and the vocabulary has {}", vocabulary.size());
                return Err(TrainError::path(path, problem, "give the vocabulary that the tokens were made with"));
            }
            Ok(tokens)
        };
        let mut all = Vec::new();
        for (source, path) in train.iter().zip(&settings.train) {
            all.push(tokens(source, "data.train", path)?);
        }
        let mut held = Vec::new();
        for (source, path) in validation.iter().zip(&settings.validation) {
            held.push(tokens(source, "data.validation", path)?);
        }
        let length = settings.sequence_length;
        let mut kept = Vec::new();
        for (tokens, path) in all.into_iter().zip(&settings.train) {
            let aside = if settings.validation.is_empty() {
                (tokens.len() as f64 * settings.validation_fraction) as usize
            } else {
                0
            };
            let (front, back) = tokens.split(tokens.len() - aside);
            if front.len() <= length {
                let problem = format!("it has {} tokens to train on, and a sequence takes {}", front.len(), length + 1);
                let remedy = "give more data, or lower data.sequence_length or data.validation_fraction";
                return Err(TrainError::path(path, problem, remedy));
            }
            kept.push(front);
            held.push(back);
        }
        let total: f64 = kept.iter().map(|tokens| tokens.len() as f64).sum();
        let mut shares: Vec<f64> = match settings.weights.is_empty() {
            true => kept.iter().map(|tokens| tokens.len() as f64 / total).collect(),
            false => settings.weights.clone(),
        };
        let sum: f64 = shares.iter().sum();
        shares.iter_mut().for_each(|share| *share /= sum);
        let validation = held.into_iter().fold(Tokens::new(&[], vocabulary.size()), Tokens::then);
        Ok(Self { vocabulary, train: kept, shares, validation })
    }

    /// A number of the data: other data gives another.
    pub fn fingerprint(&self) -> u64 {
        const SAMPLES: usize = 4096;
        let mut hash = mix(self.vocabulary.size() as u64);
        let mut id = [0];
        for tokens in self.train.iter().chain([&self.validation]) {
            hash = mix(hash ^ tokens.len() as u64);
            for i in 0..SAMPLES.min(tokens.len()) {
                tokens.read(i * tokens.len() / SAMPLES.min(tokens.len()), &mut id);
                hash = mix(hash ^ u64::from(id[0]));
            }
        }
        hash
    }
}

impl Source {
    fn open(path: &std::path::Path) -> Result<Self> {
        if path.is_dir()
            && let Some(index) = ShardIndex::read(path)?
        {
            return Tokens::of_folder(path, &index).map(Self::Tokens);
        }
        let files = files_of(path)?;
        let is_tokens = |file: &std::path::PathBuf| FileKind::of(file) == FileKind::Tokens;
        if files.iter().all(is_tokens) {
            let shards = files.iter().map(|file| Tokens::open(file, 2)).collect::<Result<Vec<_>>>()?;
            return Ok(Self::Tokens(shards.into_iter().fold(Tokens::new(&[], 1), Tokens::then)));
        }
        if let Some(file) = files.iter().find(|file| is_tokens(file)) {
            let remedy = "name token files and texts as two of data.train";
            return Err(TrainError::path(file, "a token file stands among texts", remedy));
        }
        files.iter().map(|file| DocumentFile::open(file)).collect::<Result<_>>().map(Self::Texts)
    }

    /// Each document's tokens, then the token that ends it where there is more than one document.
    fn tokens(&self, vocabulary: &Vocabulary, field: &str, stop: &AtomicBool) -> Result<Tokens> {
        let files = match self {
            Self::Tokens(tokens) => return Ok(tokens.clone()),
            Self::Texts(files) => files,
        };
        let mut ids = Vec::new();
        let is_one_text = is_one_text(files);
        for file in files {
            file.each(field, |text| {
                check_stop(stop)?;
                vocabulary.encode(&file.name(), text, &mut ids)?;
                ids.extend(vocabulary.end_of_text().filter(|_| !is_one_text));
                Ok(())
            })?;
        }
        Ok(Tokens::new(&ids, vocabulary.size()))
    }
}

fn is_one_text(files: &[DocumentFile]) -> bool {
    files.len() == 1 && FileKind::of(std::path::Path::new(&files[0].name())) == FileKind::Text
}

fn vocabulary(
    settings: &DataSettings,
    tokenizer: Option<Vocabulary>,
    train: &[Source],
    validation: &[Source],
    stop: &AtomicBool,
) -> Result<Vocabulary> {
    let choice = match (&settings.vocabulary, tokenizer) {
        (None, Some(tokenizer)) => return Ok(tokenizer),
        (None, None) => shards_vocabulary(settings).unwrap_or(VocabularyChoice::Bytes),
        (Some(text), _) => VocabularyChoice::parse(text),
    };
    match choice {
        VocabularyChoice::Bytes => Vocabulary::bytes(),
        VocabularyChoice::Path(path) => Vocabulary::open(&path),
        VocabularyChoice::Characters => {
            let mut texts: Vec<String> = Vec::new();
            let mut has_end = false;
            for source in train.iter().chain(validation) {
                let Source::Texts(files) = source else {
                    let why = "cannot go with token files, which have a vocabulary already; name its tokenizer.json";
                    return Err(TrainError::setting("data.vocabulary", "characters", why));
                };
                has_end |= !is_one_text(files);
                for file in files {
                    // Only what characters there are is kept.
                    let mut found = std::collections::BTreeSet::new();
                    file.each(&settings.text_field, |text| {
                        check_stop(stop)?;
                        found.extend(text.chars());
                        Ok(())
                    })?;
                    texts.push(found.into_iter().collect());
                }
            }
            Vocabulary::characters(texts.iter().map(String::as_str), has_end)
        }
    }
}

/// The tokenizer beside the first folder of shards.
fn shards_vocabulary(settings: &DataSettings) -> Option<VocabularyChoice> {
    let found = settings.train.iter().find(|path| path.join("tokenizer.json").is_file())?;
    Some(VocabularyChoice::Path(found.join("tokenizer.json")))
}

/// How far the data has been read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataPosition {
    /// Sequences taken of each source.
    pub taken: Vec<u64>,
}

/// The inputs of a micro-batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// I32 `[tokens]`: the tokens of all sequences.
    pub token_ids: Vec<i32>,
    /// I32 `[tokens]`: the position of each in its text.
    pub positions: Vec<i32>,
    /// I32 `[tokens]`: the text of each; tokens see those of their own text.
    pub seq_ids: Vec<i32>,
    /// I32 `[tokens]`: the token that follows each; -1 where none is asked for.
    pub targets: Vec<i32>,
}

impl Batch {
    /// Targets that are asked for.
    pub fn target_count(&self) -> usize {
        self.targets.iter().filter(|target| **target >= 0).count()
    }

    fn clear(&mut self) {
        let Self { token_ids, positions, seq_ids, targets } = self;
        [token_ids, positions, seq_ids, targets].into_iter().for_each(Vec::clear);
    }

    /// Adds a sequence of `ids`, of which the last is a target only; each token equal to `boundary` ends a text.
    fn push(&mut self, ids: &[u32], boundary: Option<u32>) {
        let mut text = self.seq_ids.last().map_or(0, |last| last + 1);
        let mut position = 0;
        for pair in ids.windows(2) {
            let ends = boundary == Some(pair[0]);
            self.token_ids.push(pair[0] as i32);
            self.positions.push(position);
            self.seq_ids.push(text);
            self.targets.push(if ends { -1 } else { pair[1] as i32 });
            position += 1;
            if ends {
                (position, text) = (0, text + 1);
            }
        }
    }

    /// Adds `count` tokens of no text.
    fn pad(&mut self, count: usize) {
        self.token_ids.extend(std::iter::repeat_n(0, count));
        self.positions.extend(std::iter::repeat_n(0, count));
        self.seq_ids.extend(std::iter::repeat_n(-1, count));
        self.targets.extend(std::iter::repeat_n(-1, count));
    }
}

/// Batches of a corpus.
pub struct Batches {
    sources: Vec<Tokens>,
    shares: Vec<f64>,
    validation: Tokens,
    length: usize,
    seed: u64,
    /// The token that ends a text within a sequence.
    boundary: Option<u32>,
    position: DataPosition,
    ids: Vec<u32>,
}

impl Batches {
    /// Those of `corpus` in the order of `seed`, from the beginning.
    ///
    /// # Errors
    /// When documents are to be packed and the vocabulary has no token that ends them.
    pub fn new(corpus: &Corpus, settings: &DataSettings, seed: u64) -> Result<Self> {
        let boundary = match settings.packing {
            Packing::Stream => None,
            Packing::Documents => Some(corpus.vocabulary.end_of_text().ok_or_else(|| {
                let why =
                    "needs a token that ends texts, which the vocabulary lacks; use stream, or another vocabulary";
                TrainError::setting("data.packing", "documents", why)
            })?),
        };
        Ok(Self {
            sources: corpus.train.clone(),
            shares: corpus.shares.clone(),
            validation: corpus.validation.clone(),
            length: settings.sequence_length,
            seed,
            boundary,
            position: DataPosition { taken: vec![0; corpus.train.len()] },
            ids: vec![0; settings.sequence_length + 1],
        })
    }

    /// How far they have been taken.
    pub fn position(&self) -> &DataPosition {
        &self.position
    }

    /// Goes on at `position`.
    ///
    /// # Errors
    /// When it is of another number of sources.
    pub fn seek(&mut self, position: DataPosition) -> Result<()> {
        if position.taken.len() != self.sources.len() {
            let why = format!("the checkpoint is of {} sources; name the same as then", position.taken.len());
            return Err(TrainError::setting("data.train", format!("{} sources", self.sources.len()), why));
        }
        self.position = position;
        Ok(())
    }

    /// Fills `batch` with the next `sequences` sequences.
    pub fn next(&mut self, sequences: usize, batch: &mut Batch) {
        batch.clear();
        for _ in 0..sequences {
            let source = next_source(&self.shares, &self.position.taken);
            let number = self.position.taken[source];
            self.position.taken[source] += 1;
            let begin = self.begin(source, number);
            self.sources[source].read(begin, &mut self.ids);
            batch.push(&self.ids, self.boundary);
        }
    }

    /// Passes over the data of each source so far.
    pub fn epochs(&self) -> f64 {
        let of = |(tokens, taken): (&Tokens, &u64)| *taken as f64 * self.length as f64 / tokens.len() as f64;
        self.sources.iter().zip(&self.position.taken).map(of).fold(0.0, f64::max)
    }

    /// Where sequence `number` of a source begins: each pass cuts the source in other places, and takes the sequences in
    /// another order.
    fn begin(&self, source: usize, number: u64) -> usize {
        let tokens = self.sources[source].len();
        let fit = (tokens - 1) / self.length;
        let sequences = fit.saturating_sub(1).max(1) as u64;
        let slack = (tokens - 1 - sequences as usize * self.length).min(self.length - 1);
        let (pass, index) = (number / sequences, number % sequences);
        let key = mix(self.seed ^ mix(((source as u64) << 48) ^ pass));
        let offset = (mix(key ^ 1) % (slack as u64 + 1)) as usize;
        offset + Permutation::new(sequences, key).at(index) as usize * self.length
    }

    /// Fills `batch` with part `part` of the `parts` that losses are measured on: `sequences` sequences each, evenly
    /// spaced and without overlap where the data suffices; padded where not. `None` behind the last.
    pub fn validation(&mut self, part: usize, parts: usize, sequences: usize, batch: &mut Batch) -> bool {
        let fit = self.validation.len().saturating_sub(1) / self.length;
        let count = fit.min(parts * sequences);
        let first = part * sequences;
        if first >= count {
            return false;
        }
        batch.clear();
        let last = (first + sequences).min(count);
        for index in first..last {
            let begin = index * fit / count * self.length;
            self.validation.read(begin, &mut self.ids);
            batch.push(&self.ids, self.boundary);
        }
        batch.pad((first + sequences - last) * self.length);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batches(sources: &[usize], seed: u64, packing: Packing) -> Batches {
        let vocabulary = Vocabulary::bytes().expect("builds");
        let mut begins = 0;
        let train: Vec<Tokens> = sources
            .iter()
            .map(|len| {
                let ids: Vec<u32> = (0..*len as u32).map(|i| (begins + i) % 257).collect();
                begins += 100;
                Tokens::new(&ids, 257)
            })
            .collect();
        let shares = vec![1.0 / sources.len() as f64; sources.len()];
        let corpus = Corpus { vocabulary, train, shares, validation: Tokens::new(&(0..100).collect::<Vec<_>>(), 257) };
        let settings = DataSettings { sequence_length: 8, packing, ..DataSettings::default() };
        Batches::new(&corpus, &settings, seed).expect("has an end")
    }

    #[test]
    fn targets_are_the_tokens_that_follow() {
        let mut batch = Batch::default();
        batches(&[1000], 3, Packing::Stream).next(4, &mut batch);
        assert_eq!(batch.token_ids.len(), 32);
        for (i, (token, target)) in batch.token_ids.iter().zip(&batch.targets).enumerate() {
            assert_eq!((token + 1) % 257, *target);
            assert_eq!((batch.positions[i], batch.seq_ids[i]), (i as i32 % 8, i as i32 / 8));
        }
    }

    #[test]
    fn a_pass_takes_each_sequence_once_and_the_next_in_another_order() {
        let batches = batches(&[1001], 3, Packing::Stream);
        let pass = |pass: u64| (pass * 124..(pass + 1) * 124).map(|n| batches.begin(0, n)).collect::<Vec<_>>();
        let sorted = |mut all: Vec<usize>| {
            all.sort_unstable();
            all
        };
        for number in 0..3 {
            let all = sorted(pass(number));
            assert!(all.windows(2).all(|pair| pair[1] - pair[0] == 8) && all[123] + 9 <= 1001, "{all:?}");
        }
        assert_ne!(pass(0), pass(1));
        assert_ne!(sorted(pass(0))[0], sorted(pass(1))[0].min(sorted(pass(2))[0]).min(99));
    }

    #[test]
    fn going_on_anywhere_gives_the_batches_of_an_undisturbed_run() {
        let mut whole = batches(&[1000, 300], 5, Packing::Stream);
        let mut batch = Batch::default();
        let all: Vec<Batch> = (0..40)
            .map(|_| {
                whole.next(3, &mut batch);
                batch.clone()
            })
            .collect();
        let mut first = batches(&[1000, 300], 5, Packing::Stream);
        (0..17).for_each(|_| first.next(3, &mut batch));
        let mut second = batches(&[1000, 300], 5, Packing::Stream);
        second.seek(first.position().clone()).expect("fits");
        for wanted in &all[17..] {
            second.next(3, &mut batch);
            assert_eq!(batch, *wanted);
        }
        // However many sequences a batch has, they are the same ones.
        let mut single = batches(&[1000, 300], 5, Packing::Stream);
        let mut tokens = Vec::new();
        for _ in 0..3 * 40 {
            single.next(1, &mut batch);
            tokens.extend(batch.token_ids.clone());
        }
        assert_eq!(tokens, all.iter().flat_map(|batch| batch.token_ids.clone()).collect::<Vec<_>>());
    }

    #[test]
    fn packed_documents_do_not_see_each_other() {
        let mut batch = Batch::default();
        batch.push(&[1, 2, 256, 3, 4, 5], Some(256));
        batch.push(&[6, 7, 8], Some(256));
        assert_eq!(batch.token_ids, [1, 2, 256, 3, 4, 6, 7]);
        assert_eq!(batch.seq_ids, [0, 0, 0, 1, 1, 2, 2]);
        assert_eq!(batch.positions, [0, 1, 2, 0, 1, 0, 1]);
        assert_eq!(batch.targets, [2, 256, -1, 4, 5, 7, 8]);
        assert_eq!(batch.target_count(), 6);
    }

    #[test]
    fn validation_is_the_same_each_time_and_padded_at_its_end() {
        let mut batches = batches(&[1000], 3, Packing::Stream);
        let mut batch = Batch::default();
        let mut seen = Vec::new();
        for part in 0..10 {
            if batches.validation(part, 10, 5, &mut batch) {
                assert_eq!(batch.token_ids.len(), 40);
                seen.extend(batch.token_ids.iter().zip(&batch.targets).filter(|(_, t)| **t >= 0).map(|(id, _)| *id));
            }
        }
        assert_eq!(seen, (0..96).collect::<Vec<_>>());
        assert!(batches.validation(0, 1, 3, &mut batch));
        assert_eq!(batch.token_ids.iter().step_by(8).copied().collect::<Vec<_>>(), [0, 32, 64]);
    }
}
