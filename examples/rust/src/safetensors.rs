//! A safetensors file: the length of a header as eight bytes, the header in JSON, then the tensors' elements.

use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::files;
use crate::json::Json;
use crate::Result;

/// The most bytes of a header.
const MOST_HEADER: u64 = 1 << 24;

/// The source of bytes: a file, or memory in the tests.
pub trait Source: Read + Seek {}
impl<T: Read + Seek> Source for T {}

/// The tensors of a file. Each is taken once, in the shape that the configuration implies, and read only then.
pub struct Tensors {
    path: PathBuf,
    source: Box<dyn Source>,
    tensors: BTreeMap<String, Json>,
    data: Range<u64>, // after the header
}

impl Tensors {
    pub fn read(path: &Path) -> Result<Self> {
        let (file, size) = files::open(path)?;
        Self::parse(path, Box::new(file), size)
    }

    fn parse(path: &Path, mut source: Box<dyn Source>, size: u64) -> Result<Self> {
        let error = |what: &str| format!("{} is no safetensors file: {what}", path.display());
        let mut length = [0; 8];
        source.read_exact(&mut length).map_err(|_| error("it has no header"))?;
        let length = u64::from_le_bytes(length);
        if length > MOST_HEADER.min(size.saturating_sub(8)) {
            return Err(error("it ends within its header, or that is larger than any").into());
        }
        let mut header = vec![0; length as usize];
        source.read_exact(&mut header).map_err(|_| error("it ends within its header"))?;
        let header = String::from_utf8(header).map_err(|_| error("its header is not UTF-8"))?;
        let header = Json::parse(&header).map_err(|what| error(&format!("its header is {what}")))?;
        let mut tensors = match header {
            Json::Object(tensors) => tensors,
            _ => return Err(error("its header is no object").into()),
        };
        tensors.remove("__metadata__");
        let data = 8 + length..size;
        let room = data.end - data.start;
        let within = tensors.values().filter_map(place).filter(|at| at.end <= room);
        if within.fold(0u64, |sum, at| sum.saturating_add(at.end - at.start)) > room {
            return Err(error("its tensors lie within each other").into());
        }
        Ok(Tensors { path: path.into(), source, tensors, data })
    }

    /// Decodes a tensor, and removes it from the list.
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let path = self.path.display();
        let entry = self.tensors.remove(name).ok_or_else(|| format!("{path} has no tensor {name}"))?;
        let found = counts(entry.get("shape")).ok_or_else(|| format!("{path}: tensor {name} has no shape"))?;
        if found != shape {
            return Err(format!("{path}: tensor {name} has the shape {found:?}, where {shape:?} is needed").into());
        }
        let (width, decode) = match entry.get("dtype") {
            Some(Json::String(dtype)) if dtype == "F32" => (4, f32_of as fn(&[u8]) -> f32),
            Some(Json::String(dtype)) if dtype == "F16" => (2, f16_of as _),
            Some(Json::String(dtype)) if dtype == "BF16" => (2, bf16_of as _),
            _ => return Err(format!("{path}: tensor {name} must be of type F32, F16 or BF16").into()),
        };
        let size = shape.iter().try_fold(width, |size: usize, n| size.checked_mul(*n));
        let fits = |at: &Range<u64>| {
            at.end <= self.data.end - self.data.start && size.map(|size| size as u64) == Some(at.end - at.start)
        };
        let at = place(&entry).filter(fits);
        let at = at.ok_or_else(|| format!("{path}: tensor {name} does not lie in the file as its shape says"))?;
        let mut bytes = vec![0; (at.end - at.start) as usize];
        let read = self.source.seek(SeekFrom::Start(self.data.start + at.start));
        read.and_then(|_| self.source.read_exact(&mut bytes)).map_err(|error| format!("{path}: {error}"))?;
        let values: Vec<f32> = bytes.chunks_exact(width).map(decode).collect();
        if values.iter().all(|x| x.is_finite()) {
            Ok(values)
        } else {
            Err(format!("{path}: tensor {name} has an element that is no finite number").into())
        }
    }

    /// Refuses tensors that were not taken, except for one: without its biases a model gives text that is wrong, and
    /// looks right.
    pub fn finish(self, unused: &str) -> Result<()> {
        match self.tensors.keys().find(|name| *name != unused) {
            Some(name) => {
                Err(format!("{} has a tensor {name}, which a plain Llama has not", self.path.display()).into())
            }
            None => Ok(()),
        }
    }
}

/// The range of a tensor's bytes after the header.
fn place(entry: &Json) -> Option<Range<u64>> {
    match counts(entry.get("data_offsets"))?[..] {
        [begin, end] if begin <= end => Some(begin as u64..end as u64),
        _ => None,
    }
}

fn counts(list: Option<&Json>) -> Option<Vec<usize>> {
    match list? {
        Json::Array(values) => values.iter().map(Json::as_count).collect(),
        _ => None,
    }
}

fn f32_of(bytes: &[u8]) -> f32 {
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// The f32 whose upper half is this bf16.
fn bf16_of(bytes: &[u8]) -> f32 {
    f32_of(&[0, 0, bytes[0], bytes[1]])
}

fn f16_of(bytes: &[u8]) -> f32 {
    let bits = u32::from(u16::from_le_bytes([bytes[0], bytes[1]]));
    let (sign, exponent, fraction) = (bits >> 15 << 31, bits >> 10 & 31, bits & 1023);
    match exponent {
        0 => f32::from_bits(sign | (fraction as f32 / (1 << 24) as f32).to_bits()),
        31 => f32::from_bits(sign | 0x7f80_0000 | fraction << 13),
        _ => f32::from_bits(sign | (exponent + 127 - 15) << 23 | fraction << 13),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
    }

    fn take(bytes: Vec<u8>, shape: &[usize]) -> Result<Vec<f32>, String> {
        let size = bytes.len() as u64;
        let tensors = Tensors::parse(Path::new("file"), Box::new(Cursor::new(bytes)), size);
        tensors.and_then(|mut tensors| tensors.take("x", shape)).map_err(|error| error.to_string())
    }

    #[test]
    fn elements_are_decoded() {
        let halves = [0x0000u16, 0x8000, 0x0001, 0x03ff, 0x0400, 0x3c00, 0xc248, 0x7bff, 0x7c00, 0xfc00, 0x7e00];
        let expected = [0.0, -0.0, 5.9604645e-8, 6.097555e-5, 6.1035156e-5, 1.0, -3.140625, 65504.0];
        let found = halves.map(|bits| f16_of(&bits.to_le_bytes()));
        assert_eq!(found[..8].iter().map(|x| x.to_bits()).collect::<Vec<_>>(), expected.map(f32::to_bits));
        assert_eq!(found[8..10], [f32::INFINITY, f32::NEG_INFINITY]);
        assert!(found[10].is_nan());
        assert_eq!(bf16_of(&0x4049u16.to_le_bytes()), 3.140625);

        let header =
            r#"{"__metadata__": {"format": "pt"}, "x": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}"#;
        let data: Vec<u8> = [0.0f32, 1.5, -2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(take(file(header, &data), &[2]), Ok(vec![1.5, -2.0]));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        for (entry, sentence) in [
            (r#"{}"#, "file: tensor x has no shape"),
            (r#"7"#, "file: tensor x has no shape"),
            (r#"{"shape": [2, -1]}"#, "file: tensor x has no shape"),
            (r#"{"shape": [3]}"#, "file: tensor x has the shape [3], where [2] is needed"),
            (r#"{"shape": [2], "dtype": "I64"}"#, "file: tensor x must be of type F32, F16 or BF16"),
            (r#"{"shape": [2], "dtype": "F16"}"#, "does not lie in the file"),
            (r#"{"shape": [2], "dtype": "F16", "data_offsets": [0]}"#, "does not lie in the file"),
            (r#"{"shape": [2], "dtype": "F16", "data_offsets": [4, 0]}"#, "does not lie in the file"),
            (r#"{"shape": [2], "dtype": "F16", "data_offsets": [0, 2]}"#, "does not lie in the file"),
            (r#"{"shape": [2], "dtype": "F16", "data_offsets": [6, 10]}"#, "does not lie in the file"),
            (r#"{"shape": [2], "dtype": "F32", "data_offsets": [0, 4]}"#, "does not lie in the file"),
        ] {
            let error = take(file(&format!("{{\"x\": {entry}}}"), &[0; 8]), &[2]).unwrap_err();
            assert!(error.contains(sentence), "{entry}: {error}");
        }
        let huge = [1 << 33, 1 << 33];
        let entry = r#"{"x": {"shape": [8589934592, 8589934592], "dtype": "F16", "data_offsets": [0, 0]}}"#;
        assert!(take(file(entry, &[]), &huge).unwrap_err().contains("does not lie in the file"));
    }

    #[test]
    fn damaged_headers_are_refused() {
        let whole = file(r#"{"x": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}"#, &[0; 4]);
        for length in 0..whole.len() {
            take(whole[..length].to_vec(), &[2]).unwrap_err();
        }
        for (at, sentence) in
            [(0, "it ends within its header"), (7, "it ends within its header"), (8, "its header is not UTF-8")]
        {
            let mut bytes = whole.clone();
            bytes[at] = 0xff;
            let error = take(bytes, &[2]).unwrap_err();
            assert!(error.starts_with("file is no safetensors file: "), "{error}");
            assert!(error.contains(sentence), "{at}: {error}");
        }
        assert!(take(file("[]", &[]), &[2]).unwrap_err().contains("its header is no object"));
    }
}
