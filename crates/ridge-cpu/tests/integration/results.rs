//! Results of samples, as a process that runs with one instruction set hands them to another that judges them.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Result, Write};

use ridge_graph::conformance::Reference;
use ridge_graph::{DType, Tensor};

use crate::common::same_bits;

/// What a sample gives, or why it gives nothing.
pub(crate) struct Results {
    /// By kernels that claim patterns.
    pub(crate) claimed: Vec<Tensor>,
    /// Decomposed.
    pub(crate) unclaimed: Vec<Tensor>,
}

impl Results {
    /// # Errors
    /// What is wrong.
    pub(crate) fn judge(&self, reference: &Reference<'_>) -> std::result::Result<(), String> {
        reference.judge(&self.claimed)?;
        if !same_bits(&self.claimed, &self.unclaimed) {
            reference.judge(&self.unclaimed).map_err(|why| format!("decomposed: {why}"))?;
        }
        Ok(())
    }
}

/// Writes results to a file: of each sample a number, and what it tells of: 0 for an error, 1 where both ways give the same
/// bits, 2 for both results.
pub(crate) struct ResultWriter(BufWriter<File>);

impl ResultWriter {
    pub(crate) fn new(file: File) -> Self {
        Self(BufWriter::new(file))
    }

    pub(crate) fn write(&mut self, results: &std::result::Result<Results, String>) -> Result<()> {
        match results {
            Err(why) => {
                self.number(0)?;
                self.bytes(why.as_bytes())
            }
            Ok(results) => {
                let same = same_bits(&results.claimed, &results.unclaimed);
                self.number(if same { 1 } else { 2 })?;
                self.tensors(&results.claimed)?;
                if same { Ok(()) } else { self.tensors(&results.unclaimed) }
            }
        }
    }

    /// Must be called behind the last one.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.0.flush()
    }

    fn tensors(&mut self, tensors: &[Tensor]) -> Result<()> {
        self.number(tensors.len())?;
        for tensor in tensors {
            self.bytes(tensor.dtype.name().as_bytes())?;
            self.number(tensor.shape.len())?;
            tensor.shape.iter().try_for_each(|extent| self.number(*extent))?;
            self.bytes(&tensor.to_bytes())?;
        }
        Ok(())
    }

    fn bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.number(bytes.len())?;
        self.0.write_all(bytes)
    }

    fn number(&mut self, number: usize) -> Result<()> {
        self.0.write_all(&(number as u64).to_le_bytes())
    }
}

/// Reads what a [`ResultWriter`] has written.
pub(crate) struct ResultReader(BufReader<File>);

impl ResultReader {
    pub(crate) fn new(file: File) -> Self {
        Self(BufReader::new(file))
    }

    /// Of the next sample.
    pub(crate) fn read(&mut self) -> Result<std::result::Result<Results, String>> {
        let kind = self.number()?;
        if kind == 0 {
            return Ok(Err(self.text()?));
        }
        let claimed = self.tensors()?;
        let unclaimed = if kind == 1 { claimed.clone() } else { self.tensors()? };
        Ok(Ok(Results { claimed, unclaimed }))
    }

    /// Is nothing left?
    pub(crate) fn is_at_end(&mut self) -> Result<bool> {
        Ok(self.0.read(&mut [0])? == 0)
    }

    fn tensors(&mut self) -> Result<Vec<Tensor>> {
        (0..self.number()?).map(|_| self.tensor()).collect()
    }

    fn tensor(&mut self) -> Result<Tensor> {
        let dtype = DType::from_name(&self.text()?).expect("a dtype's name");
        let shape = (0..self.number()?).map(|_| self.number()).collect::<Result<Vec<_>>>()?;
        Ok(Tensor::from_bytes(dtype, &shape, &self.bytes()?))
    }

    fn text(&mut self) -> Result<String> {
        Ok(String::from_utf8_lossy(&self.bytes()?).into_owned())
    }

    fn bytes(&mut self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.number()?];
        self.0.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn number(&mut self) -> Result<usize> {
        let mut bytes = [0; 8];
        self.0.read_exact(&mut bytes)?;
        Ok(u64::from_le_bytes(bytes) as usize)
    }
}
