//! Reads the JSON of configurations and headers.

use std::collections::BTreeMap;
use std::fmt;

/// The deepest nesting of brackets, so that no file exhausts the stack.
const MOST_LEVELS: usize = 64;

/// The most values, so that a text of some MB cannot take GB of memory. An object counts as eight, an array as two.
const MOST_VALUES: usize = 1 << 19;

#[derive(Debug, PartialEq)]
pub enum Json {
    Null,
    Bool(bool),
    Number(f64),
    String(String),
    Array(Vec<Json>),
    Object(BTreeMap<String, Json>),
}

impl Json {
    /// Reads a text that is one value. The error says where it is malformed.
    pub fn parse(text: &str) -> Result<Json, String> {
        let mut reader = Reader { rest: text, length: text.len(), left: MOST_VALUES };
        let value = reader.value(MOST_LEVELS)?;
        reader.skip_space();
        if reader.rest.is_empty() {
            Ok(value)
        } else {
            Err(reader.error("the end"))
        }
    }

    /// A field of an object; `None` where it is missing or null.
    pub fn get(&self, name: &str) -> Option<&Json> {
        match self {
            Json::Object(fields) => fields.get(name).filter(|value| **value != Json::Null),
            _ => None,
        }
    }

    /// A whole number that an f64 holds exactly.
    pub fn as_count(&self) -> Option<usize> {
        match self {
            Json::Number(n) if n.fract() == 0.0 && (0.0..9e15).contains(n) => usize::try_from(*n as u64).ok(),
            _ => None,
        }
    }
}

/// Describes a value in a message.
impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Json::Null => f.write_str("null"),
            Json::Bool(value) => value.fmt(f),
            Json::Number(value) => value.fmt(f),
            Json::String(value) => write!(f, "{value:?}"),
            Json::Array(_) => f.write_str("a list"),
            Json::Object(_) => f.write_str("an object"),
        }
    }
}

struct Reader<'a> {
    rest: &'a str,
    length: usize,
    left: usize, // values that may follow
}

impl Reader<'_> {
    fn error(&self, expected: &str) -> String {
        format!("no JSON: {expected} was expected at byte {}", self.length - self.rest.len())
    }

    fn skip_space(&mut self) {
        self.rest = self.rest.trim_start_matches([' ', '\t', '\r', '\n']);
    }

    /// Skips this text if it comes next; returns whether it did.
    fn take(&mut self, text: &str) -> bool {
        self.skip_space();
        let rest = self.rest.strip_prefix(text);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn expect(&mut self, text: &str) -> Result<(), String> {
        if self.take(text) {
            Ok(())
        } else {
            Err(self.error(text))
        }
    }

    fn next(&mut self) -> Result<char, String> {
        let next = self.rest.chars().next().ok_or_else(|| self.error("more"))?;
        self.rest = &self.rest[next.len_utf8()..];
        Ok(next)
    }

    fn value(&mut self, levels: usize) -> Result<Json, String> {
        self.skip_space();
        let first = self.rest.bytes().next();
        let cost = match first {
            Some(b'{') => 8,
            Some(b'[') => 2,
            _ => 1,
        };
        self.left = self.left.checked_sub(cost).ok_or_else(|| self.error("no further value"))?;
        match first {
            Some(b'{' | b'[') if levels == 0 => Err(self.error("no further level")),
            Some(b'{') => self.object(levels - 1),
            Some(b'[') => self.array(levels - 1),
            Some(b'"') => self.string().map(Json::String),
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ if self.take("null") => Ok(Json::Null),
            _ if self.take("true") => Ok(Json::Bool(true)),
            _ if self.take("false") => Ok(Json::Bool(false)),
            _ => Err(self.error("a value")),
        }
    }

    fn object(&mut self, levels: usize) -> Result<Json, String> {
        let mut fields = BTreeMap::new();
        self.expect("{")?;
        if !self.take("}") {
            loop {
                let name = self.string()?;
                self.expect(":")?;
                fields.insert(name, self.value(levels)?);
                if self.take("}") {
                    break;
                }
                self.expect(",")?;
            }
        }
        Ok(Json::Object(fields))
    }

    fn array(&mut self, levels: usize) -> Result<Json, String> {
        let mut values = Vec::new();
        self.expect("[")?;
        if !self.take("]") {
            loop {
                values.push(self.value(levels)?);
                if self.take("]") {
                    break;
                }
                self.expect(",")?;
            }
        }
        Ok(Json::Array(values))
    }

    fn number(&mut self) -> Result<Json, String> {
        let is_part = |c: char| c.is_ascii_digit() || "+-.eE".contains(c);
        let rest = self.rest.trim_start_matches(is_part);
        let text = &self.rest[..self.rest.len() - rest.len()];
        let number = text.parse().map_err(|_| self.error("a number"))?;
        self.rest = rest;
        Ok(Json::Number(number))
    }

    fn string(&mut self) -> Result<String, String> {
        self.expect("\"")?;
        let mut string = String::new();
        loop {
            match self.next()? {
                '"' => return Ok(string),
                '\\' => string.push(self.escaped()?),
                '\0'..='\x1f' => return Err(self.error("no control character")),
                character => string.push(character),
            }
        }
    }

    /// The character that a backslash and what follows it stand for.
    fn escaped(&mut self) -> Result<char, String> {
        Ok(match self.next()? {
            'b' => '\x08',
            'f' => '\x0c',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'u' => {
                let mut units = vec![self.unit()?];
                if (0xd800..0xdc00).contains(&units[0]) && self.rest.starts_with("\\u") {
                    self.rest = &self.rest[2..];
                    units.push(self.unit()?); // the second half of a surrogate pair
                }
                let text = String::from_utf16(&units).map_err(|_| self.error("a character"))?;
                text.chars().next().ok_or_else(|| self.error("a character"))?
            }
            same @ ('"' | '\\' | '/') => same,
            _ => return Err(self.error("an escape")),
        })
    }

    /// Four hexadecimal digits.
    fn unit(&mut self) -> Result<u16, String> {
        (0..4).try_fold(0, |unit, _| {
            let digit = self.next()?.to_digit(16).ok_or_else(|| self.error("a hexadecimal digit"))?;
            Ok(unit << 4 | digit as u16)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Json;

    fn string(text: &str) -> Json {
        Json::String(text.into())
    }

    #[test]
    fn values_are_read() {
        let text = r#" {"a": [1, -2.5e1, true, null], "b": {}, "c": "é\n\"\u00e9\ud83d\ude00", "d": []} "#;
        let value = Json::parse(text).unwrap();
        let numbers = vec![Json::Number(1.0), Json::Number(-25.0), Json::Bool(true), Json::Null];
        assert_eq!(value.get("a"), Some(&Json::Array(numbers)));
        assert_eq!(value.get("b"), Some(&Json::Object(Default::default())));
        assert_eq!(value.get("c"), Some(&string("é\n\"é😀")));
        assert_eq!(value.get("d"), Some(&Json::Array(Vec::new())));
        assert_eq!(value.get("e"), None);
        assert_eq!(Json::parse(r#"{"a": null, "a": "last"}"#).unwrap().get("a"), Some(&string("last")));
    }

    #[test]
    fn counts_are_whole_numbers() {
        for (text, count) in
            [("7", Some(7)), ("7.0", Some(7)), ("-1", None), ("0.5", None), ("1e30", None), ("[]", None)]
        {
            assert_eq!(Json::parse(text).unwrap().as_count(), count, "{text}");
        }
    }

    #[test]
    fn what_is_no_json_is_refused() {
        for text in [
            "",
            " ",
            "{",
            "[1",
            "[1,]",
            "[,]",
            "{\"a\"}",
            "{\"a\":}",
            "{a: 1}",
            "1 2",
            "nul",
            "-",
            "1e",
            "--1",
            "\"",
            "\"\\",
            "\"\\x\"",
            "\"\\u12\"",
            "\"\\u+123\"",
            "\"\\ud800\"",
            "\"\\udc00\\ud800\"",
            "\"\n\"",
            "]",
            "\u{feff}1",
        ] {
            let error = Json::parse(text).unwrap_err();
            assert!(error.starts_with("no JSON: "), "{text:?}: {error}");
        }
        assert!(Json::parse(&format!("{}{}", "[".repeat(64), "]".repeat(64))).is_ok());
        for value in ["0,", "[],", "[0],", "{\"\":0},", "\"\","] {
            let many = format!("[{}0]", value.repeat(1 << 20));
            assert!(Json::parse(&many).unwrap_err().contains("no further value"), "{value}");
        }
        assert!(Json::parse(&"[".repeat(1_000_000)).unwrap_err().contains("no further level"));
    }
}
