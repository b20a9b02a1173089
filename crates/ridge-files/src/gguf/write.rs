//! Writes a file: the header, then the tensors in order.

use std::io::{self, Write};

use super::container::Gguf;
use super::read::ALIGNMENT;
use super::storage::TensorStorage;
use super::value::{GgufType, GgufValue};

/// What a file will hold, gathered before its data is written.
#[derive(Debug, Default)]
pub struct GgufWriter {
    keys: usize,
    metadata: Vec<u8>,
    tensors: Vec<(String, Vec<usize>, TensorStorage, usize)>,
}

macro_rules! scalars {
    ($($method:ident($ty:ty) => $kind:ident),* $(,)?) => {$(
        #[doc = concat!("Adds a value of type `", stringify!($ty), "`.")]
        pub fn $method(&mut self, key: &str, value: $ty) {
            self.key(key, GgufType::$kind);
            self.metadata.extend(value.to_le_bytes());
        }
    )*};
}

impl GgufWriter {
    scalars! {
        u8(u8) => U8, i8(i8) => I8, u16(u16) => U16, i16(i16) => I16, u32(u32) => U32, i32(i32) => I32, f32(f32) => F32,
        u64(u64) => U64, i64(i64) => I64, f64(f64) => F64,
    }

    /// Adds a boolean.
    pub fn bool(&mut self, key: &str, value: bool) {
        self.key(key, GgufType::Bool);
        self.metadata.push(u8::from(value));
    }

    /// Adds a text.
    pub fn text(&mut self, key: &str, value: &str) {
        self.key(key, GgufType::String);
        put_text(&mut self.metadata, value);
    }

    /// Adds an array of texts.
    pub fn texts<'a>(&mut self, key: &str, values: impl ExactSizeIterator<Item = &'a str>) {
        self.array(key, GgufType::String, values.len());
        for value in values {
            put_text(&mut self.metadata, value);
        }
    }

    /// Adds an array of floats.
    pub fn f32s(&mut self, key: &str, values: &[f32]) {
        self.array(key, GgufType::F32, values.len());
        values.iter().for_each(|v| self.metadata.extend(v.to_le_bytes()));
    }

    /// Adds an array of integers.
    pub fn i32s(&mut self, key: &str, values: &[i32]) {
        self.array(key, GgufType::I32, values.len());
        values.iter().for_each(|v| self.metadata.extend(v.to_le_bytes()));
    }

    /// Adds a copy of `value`, which is a value of `file`.
    pub fn copy(&mut self, key: &str, value: &GgufValue, file: &Gguf) {
        match value {
            GgufValue::U8(v) => self.u8(key, *v),
            GgufValue::I8(v) => self.i8(key, *v),
            GgufValue::U16(v) => self.u16(key, *v),
            GgufValue::I16(v) => self.i16(key, *v),
            GgufValue::U32(v) => self.u32(key, *v),
            GgufValue::I32(v) => self.i32(key, *v),
            GgufValue::F32(v) => self.f32(key, *v),
            GgufValue::U64(v) => self.u64(key, *v),
            GgufValue::I64(v) => self.i64(key, *v),
            GgufValue::F64(v) => self.f64(key, *v),
            GgufValue::Bool(v) => self.bool(key, *v),
            GgufValue::String(text) => self.text(key, text),
            GgufValue::Array(array) => {
                self.array(key, array.kind, array.len);
                self.metadata.extend(file.array_bytes(array));
            }
        }
    }

    /// Announces a tensor; `shape` is outermost first. Data must be written in this order.
    ///
    /// # Errors
    /// Why it cannot be stored so.
    pub fn tensor(&mut self, name: &str, shape: &[usize], storage: &TensorStorage) -> Result<(), String> {
        let bytes = storage.bytes(shape)?;
        if storage.number().is_none() {
            return Err(format!("is {}, which GGUF cannot store", storage.name()));
        }
        self.tensors.push((name.to_owned(), shape.to_vec(), storage.clone(), bytes));
        Ok(())
    }

    /// Writes the header and then what `data` gives for each tensor in turn.
    ///
    /// # Errors
    /// Those of writing, those of `data`, and where it gives another number of bytes than the tensor has.
    pub fn write<E: From<io::Error>>(
        &self,
        to: &mut impl Write,
        mut data: impl FnMut(usize) -> Result<Vec<u8>, E>,
    ) -> Result<(), E> {
        let mut header = Vec::from(*b"GGUF");
        header.extend(3u32.to_le_bytes());
        header.extend((self.tensors.len() as u64).to_le_bytes());
        header.extend((self.keys as u64).to_le_bytes());
        header.extend(&self.metadata);
        let mut offset = 0usize;
        for (name, shape, storage, bytes) in &self.tensors {
            put_text(&mut header, name);
            header.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|n| header.extend((*n as u64).to_le_bytes()));
            header.extend(storage.number().unwrap_or_default().to_le_bytes());
            header.extend((offset as u64).to_le_bytes());
            offset = (offset + bytes).next_multiple_of(ALIGNMENT);
        }
        header.resize(header.len().next_multiple_of(ALIGNMENT), 0);
        to.write_all(&header)?;
        for (index, (name, _, _, bytes)) in self.tensors.iter().enumerate() {
            let data = data(index)?;
            if data.len() != *bytes {
                return Err(io::Error::other(format!("{name} has {} bytes of {bytes}", data.len())).into());
            }
            to.write_all(&data)?;
            to.write_all(&[0; ALIGNMENT][..bytes.next_multiple_of(ALIGNMENT) - bytes])?;
        }
        Ok(())
    }

    fn key(&mut self, key: &str, kind: GgufType) {
        self.keys += 1;
        put_text(&mut self.metadata, key);
        self.metadata.extend(kind.number().to_le_bytes());
    }

    fn array(&mut self, key: &str, kind: GgufType, len: usize) {
        self.key(key, GgufType::Array);
        self.metadata.extend(kind.number().to_le_bytes());
        self.metadata.extend((len as u64).to_le_bytes());
    }
}

fn put_text(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u64).to_le_bytes());
    to.extend(text.as_bytes());
}
