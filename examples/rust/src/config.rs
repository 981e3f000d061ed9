//! Reads a model's `config.json`.

use std::path::Path;

use crate::files::read_text;
use crate::json::Json;
use crate::Result;

/// The most bytes of a configuration.
const MOST_BYTES: u64 = 1 << 20;

/// The numbers that a Llama needs.
pub struct Config {
    pub num_layers: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub vocab_size: usize,
    pub max_seq_len: usize,
    pub rms_norm_eps: f32,
    pub rope_theta: f64,
    pub tie_word_embeddings: bool,
    /// The tokens that end a text.
    pub stop: Vec<usize>,
}

impl Config {
    pub fn read(path: &Path) -> Result<Self> {
        let text = read_text(path, MOST_BYTES)?;
        let fields = Json::parse(&text).map_err(|what| format!("{} is {what}", path.display()))?;
        Self::of(&fields).map_err(|what| format!("{}: {what}", path.display()).into())
    }

    fn of(fields: &Json) -> Result<Self> {
        check_family(fields)?;
        let (hidden_size, num_heads) =
            (count(fields, "hidden_size", None)?, count(fields, "num_attention_heads", None)?);
        let config = Config {
            num_layers: count(fields, "num_hidden_layers", None)?,
            num_heads,
            num_kv_heads: count(fields, "num_key_value_heads", Some(num_heads))?,
            head_dim: count(fields, "head_dim", Some(hidden_size / num_heads))?,
            hidden_size,
            intermediate_size: count(fields, "intermediate_size", None)?,
            vocab_size: count(fields, "vocab_size", None)?,
            max_seq_len: count(fields, "max_position_embeddings", None)?,
            rms_norm_eps: positive(fields, "rms_norm_eps", None)? as f32,
            rope_theta: rope_theta(fields)?,
            tie_word_embeddings: fields.get("tie_word_embeddings") == Some(&Json::Bool(true)),
            stop: stop(fields)?,
        };
        let Config { num_heads, num_kv_heads, head_dim, vocab_size, .. } = config;
        if num_heads % num_kv_heads != 0 {
            return Err(format!("{num_heads} attention heads are no multiple of {num_kv_heads} key-value heads").into());
        }
        if head_dim % 2 != 0 {
            return Err(format!("head_dim must be even for RoPE, not {head_dim}").into());
        }
        if vocab_size != 256 {
            return Err(format!("vocab_size must be 256, as a token is a byte here, not {vocab_size}").into());
        }
        Ok(config)
    }
}

/// Refuses what the forward pass does not compute.
fn check_family(fields: &Json) -> Result<()> {
    for (name, supported) in [
        ("model_type", Json::String("llama".into())),
        ("hidden_act", Json::String("silu".into())),
        ("attention_bias", Json::Bool(false)),
        ("mlp_bias", Json::Bool(false)),
    ] {
        expect(fields, name, &supported)?;
    }
    rope(fields).map_or(Ok(()), |rope| {
        let name = if rope.get("rope_type").is_some() { "rope_type" } else { "type" };
        expect(rope, name, &Json::String("default".into()))
    })
}

fn rope(fields: &Json) -> Option<&Json> {
    fields.get("rope_parameters").or_else(|| fields.get("rope_scaling"))
}

fn rope_theta(fields: &Json) -> Result<f64> {
    let part = rope(fields).filter(|rope| rope.get("rope_theta").is_some());
    positive(part.unwrap_or(fields), "rope_theta", Some(10_000.0))
}

fn stop(fields: &Json) -> Result<Vec<usize>> {
    let tokens = match fields.get("eos_token_id") {
        None => Some(Vec::new()),
        Some(Json::Array(tokens)) => tokens.iter().map(Json::as_count).collect(),
        Some(token) => token.as_count().map(|token| vec![token]),
    };
    tokens.ok_or_else(|| "eos_token_id must be a token or a list of tokens".into())
}

fn expect(fields: &Json, name: &str, supported: &Json) -> Result<()> {
    match fields.get(name) {
        Some(value) if value != supported => {
            Err(format!("{name} {value} is not supported, only {supported} is").into())
        }
        _ => Ok(()),
    }
}

fn count(fields: &Json, name: &str, default: Option<usize>) -> Result<usize> {
    let most = i32::MAX as usize;
    match (fields.get(name), default) {
        (None, None) => Err(format!("there is no field {name:?}").into()),
        (None, Some(default)) if default > 0 => Ok(default),
        (None, Some(default)) => Err(format!("{name} would be {default}: it must be at least 1").into()),
        (Some(value), _) => match value.as_count() {
            Some(count) if (1..=most).contains(&count) => Ok(count),
            _ => Err(format!("{name} must be a whole number from 1 to {most}, not {value}").into()),
        },
    }
}

fn positive(fields: &Json, name: &str, default: Option<f64>) -> Result<f64> {
    match fields.get(name) {
        None => default.ok_or_else(|| format!("there is no field {name:?}").into()),
        Some(Json::Number(number)) if *number > 0.0 && number.is_finite() => Ok(*number),
        Some(value) => Err(format!("{name} must be a positive number, not {value}").into()),
    }
}
