//! Continues a prompt with a Llama whose tokens are bytes, through the cache, always with the likeliest token.

mod config;
mod files;
mod json;
mod llama;
mod safetensors;

use std::error::Error;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use kvcache::{ffi, Cache};
use llama::Llama;

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

const USAGE: &str = r#"usage: generate [MODEL] [PROMPT] [options]

Continues a prompt with a Llama whose tokens are bytes, always by the likeliest token.

  MODEL           folder with config.json and model.safetensors (default: the repository's examples/model)
  PROMPT          text to continue (default: "ROMEO:"); a single argument is the prompt
  --model MODEL   the same as the argument MODEL
  --tokens N      how many to generate (default: 300)
  --dtype TYPE    element type of the cache: f32, f16, bf16, q8_0, ... (default: f16)
  --threads N     threads that attend (default: the library's choice)
  -h, --help      this
"#;

const DTYPES: [(&str, i32); 9] = [
    ("f32", ffi::KVC_F32),
    ("f16", ffi::KVC_F16),
    ("bf16", ffi::KVC_BF16),
    ("q8_0", ffi::KVC_Q8_0),
    ("q4_0", ffi::KVC_Q4_0),
    ("q4_1", ffi::KVC_Q4_1),
    ("q5_0", ffi::KVC_Q5_0),
    ("q5_1", ffi::KVC_Q5_1),
    ("iq4_nl", ffi::KVC_IQ4_NL),
];

struct Options {
    prompt: String,
    model: PathBuf,
    max_new_tokens: usize,
    dtype: i32,
    num_threads: i32,
}

impl Options {
    /// `None` where help was asked for.
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Option<Self>> {
        let mut given = Vec::new();
        let mut model = None;
        let mut options = Options {
            prompt: "ROMEO:".into(),
            model: concat!(env!("CARGO_MANIFEST_DIR"), "/../model").into(),
            max_new_tokens: 300,
            dtype: ffi::KVC_F16,
            num_threads: 0,
        };
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
            match argument.as_str() {
                "-h" | "--help" => return Ok(None),
                "--model" => model = Some(value()?),
                "--tokens" => options.max_new_tokens = number("tokens", &value()?)? as usize,
                "--dtype" => options.dtype = dtype(&value()?)?,
                "--threads" => options.num_threads = number("threads", &value()?)?,
                _ if argument.starts_with("--") => return Err(format!("there is no option {argument}").into()),
                _ if given.len() == 2 => {
                    return Err(format!("{argument:?} is an argument too many: quote a prompt of several words").into())
                }
                _ => given.push(argument),
            }
        }
        options.prompt = given.pop().unwrap_or(options.prompt);
        if !given.is_empty() && model.is_some() {
            return Err("the model is given twice, as an argument and as --model".into());
        }
        options.model = given.pop().or(model).map_or(options.model, PathBuf::from);
        Ok(Some(options))
    }
}

/// A number such as 8192, 8k or 1M.
fn number(name: &str, text: &str) -> Result<i32> {
    let shift = match text.chars().last() {
        Some('k' | 'K') => 10,
        Some('m' | 'M') => 20,
        _ => 0,
    };
    let digits = &text[..text.len() - usize::from(shift > 0)];
    match digits.parse::<i32>() {
        Ok(number) if number >= 1 && number <= i32::MAX >> shift => Ok(number << shift),
        _ => Err(format!("{name} must be a whole number from 1 to {}, not {text}", i32::MAX).into()),
    }
}

fn dtype(text: &str) -> Result<i32> {
    let found = DTYPES.iter().find(|(name, _)| *name == text);
    let names = || DTYPES.map(|(name, _)| name).join(", ");
    found.map(|(_, dtype)| *dtype).ok_or_else(|| format!("dtype must be one of {}, not {text:?}", names()).into())
}

fn run() -> Result<()> {
    let mut arguments = Vec::new();
    for argument in std::env::args_os().skip(1) {
        arguments.push(argument.into_string().map_err(|argument| format!("{argument:?} is not UTF-8"))?);
    }
    match Options::parse(arguments.into_iter())? {
        Some(options) => generate(&options),
        None => Ok(io::stdout().write_all(USAGE.as_bytes())?),
    }
}

/// Writes the prompt and its continuation. The prompt is one batch, then each token is one.
fn generate(options: &Options) -> Result<()> {
    let model = Llama::load(&options.model)?;
    let c = &model.config;
    let mut cache = Cache::new(&kvcache::Config {
        num_layers: c.num_layers,
        num_kv_heads: c.num_kv_heads as i32,
        head_dim: c.head_dim as i32,
        max_seq_len: c.max_seq_len as i64,
        dtype: options.dtype,
        num_threads: options.num_threads,
    })?;
    let mut tokens = options.prompt.clone().into_bytes();
    let room = room(tokens.len(), c.max_seq_len)?;
    let mut stdout = io::stdout();
    stdout.write_all(&tokens)?;
    let mut ended = false;
    for _ in 0..room.min(options.max_new_tokens) {
        stdout.flush()?;
        let token = likeliest(&model.forward(&tokens, &mut cache)?);
        ended = c.stop.contains(&token);
        if ended {
            break;
        }
        tokens = vec![token as u8];
        stdout.write_all(&tokens)?;
    }
    if tokens.last() != Some(&b'\n') {
        stdout.write_all(b"\n")?;
    }
    stdout.flush()?;
    if !ended && room < options.max_new_tokens {
        writeln!(io::stderr(), "(stopped at {} tokens, the model's whole context)", c.max_seq_len)?;
    }
    Ok(())
}

/// How many tokens fit after a prompt.
fn room(prompt: usize, context: usize) -> Result<usize> {
    match context.saturating_sub(prompt) {
        _ if prompt == 0 => Err("the prompt is empty".into()),
        0 => Err(format!("the prompt of {prompt} tokens leaves no room in the model's context of {context}").into()),
        room => Ok(room),
    }
}

/// The index of the largest, the first of equals.
fn likeliest(logits: &[f32]) -> usize {
    (1..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

/// Makes a message with names from a file safe to print: it neither steers a terminal nor floods it.
fn printable(text: &str) -> String {
    const MOST: usize = 1000;
    let mut shown = String::new();
    for c in text.chars().take(MOST) {
        match c {
            '"' | '\'' | '\\' => shown.push(c),
            _ => shown.extend(c.escape_debug()),
        }
    }
    if text.chars().nth(MOST).is_some() {
        shown.push_str("...");
    }
    shown
}

fn main() -> ExitCode {
    let error = match run() {
        Ok(()) => return ExitCode::SUCCESS,
        Err(error) => error,
    };
    if error.downcast_ref::<io::Error>().map_or(false, |error| error.kind() == io::ErrorKind::BrokenPipe) {
        return ExitCode::from(1); // the reader closed the pipe
    }
    let _ = writeln!(io::stderr(), "generate: {}", printable(&error.to_string())); // stderr may be closed
    ExitCode::from(2)
}
