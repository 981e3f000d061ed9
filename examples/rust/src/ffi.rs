//! What a runner needs of `include/kvcache.h`, under its names and in its order. What it means is said there.
//!
//! The list below is written once and used twice: as declarations for Rust, and, in the test, as assertions that a C
//! compiler checks against the header.

#![allow(non_camel_case_types)]

use std::os::raw::{c_char, c_void};
use std::sync::atomic::AtomicI32;

macro_rules! abi {
    (
        constants { $($constant:ident = $value:literal,)* }
        opaque { $($opaque:ident,)* }
        $(struct $name:ident { $($field:ident: $type:ty,)* })*
        $(fn $function:ident($($argument:ident: $argument_type:ty),*) $(-> $result:ty)?;)*
    ) => {
        $(pub const $constant: i32 = $value;)*
        $(
            #[repr(C)]
            pub struct $opaque {
                _private: [u8; 0],
            }
        )*
        $(
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub struct $name {
                $(pub $field: $type,)*
            }

            impl Default for $name {
                /// All zero, which asks the library for its defaults.
                fn default() -> Self {
                    // SAFETY: integers, floats, raw pointers and structs of these may be zero.
                    unsafe { std::mem::zeroed() }
                }
            }
        )*
        extern "C" {
            $(pub fn $function($($argument: $argument_type),*) $(-> $result)?;)*
        }

        #[cfg(test)]
        fn assertions() -> String {
            use tests::{function, Struct};
            let mut c = vec![$(format!("_Static_assert({0} == {1}, \"{0}\");\n", stringify!($constant), $value)),*];
            $({
                let whole = std::mem::MaybeUninit::<$name>::uninit();
                let start = whole.as_ptr();
                let mut it = Struct::new(stringify!($name), std::mem::size_of::<$name>());
                $({
                    // SAFETY: the address of a field of what `whole` has room for; nothing is read.
                    let field = unsafe { std::ptr::addr_of!((*start).$field) };
                    it.field(stringify!($field), stringify!($type), field as usize - start as usize);
                })*
                c.push(it.finish());
            })*
            $(
                let result: &[&str] = &[$(stringify!($result))?];
                c.push(function(stringify!($function), &[$(stringify!($argument_type)),*], result.first()));
            )*
            c.concat()
        }
    };
}

/// An integer, since a newer library may return any number: a Rust enum with an unknown value is undefined behaviour.
pub type kvc_status = i32;

abi! {
    constants {
        KVC_OK = 0,
        KVC_ERR_INVALID = 1,
        KVC_ERR_FULL = 3,
        KVC_F32 = 0,
        KVC_F16 = 1,
        KVC_BF16 = 2,
        KVC_Q8_0 = 3,
        KVC_Q4_0 = 4,
        KVC_Q4_1 = 5,
        KVC_Q5_0 = 6,
        KVC_Q5_1 = 7,
        KVC_IQ4_NL = 8,
        KVC_INT8 = 9,
        KVC_INT6 = 10,
        KVC_INT4 = 11,
    }

    opaque {
        kvc_shift_fn,
        kvc_poll_fn,
        kvc_allocator,
        kvc_cache,
        kvc_batch,
    }

    struct kvc_policy {
        kind: i32,
        window: i32,
        num_sink_tokens: i32,
        resume_window: i32,
        attention_chunk_size: i32,
        max_len: i32,
        stride: i32,
        reserved: [i32; 2],
    }

    struct kvc_rope {
        kind: i32,
        interleaved: i32,
        first_dim: i32,
        num_freqs: i32,
        inv_freq: *const f64,
        shift: *mut kvc_shift_fn,
        user: *mut c_void,
        reserved: [i64; 2],
    }

    struct kvc_layer {
        num_kv_heads: i32,
        k_dim: i32,
        v_dim: i32,
        k_type: i32,
        v_type: i32,
        k_transform: i32,
        v_transform: i32,
        value_in_key: i32,
        share: i32,
        policy: kvc_policy,
        rope: kvc_rope,
        sketch_bits: i32,
    }

    struct kvc_config {
        struct_size: usize,
        layers: *const kvc_layer,
        layer_size: usize,
        num_layers: i32,
        block_size: i32,
        max_seq_len: i64,
        max_sequences: i64,
        capacity: i64,
        max_bytes: i64,
        num_threads: i32,
        allocator: *const kvc_allocator,
        poll: *mut kvc_poll_fn,
        poll_user: *mut c_void,
    }

    struct kvc_put_args {
        struct_size: usize,
        first: i32,
        num_tokens: i32,
        k: *const c_void,
        v: *const c_void,
        k_token_stride: i64,
        k_head_stride: i64,
        v_token_stride: i64,
        v_head_stride: i64,
        k_type: i32,
        v_type: i32,
        tokens_per_sequence: i32,
        k_batch_stride: i64,
        v_batch_stride: i64,
        seq_id: i64,
    }

    struct kvc_chosen {
        struct_size: usize,
        positions: *const i32,
        token_stride: i64,
        choice_stride: i64,
        batch_stride: i64,
        num_choices: i32,
        width: i32,
        block: i32,
        tail: i32,
    }

    struct kvc_attend_args {
        struct_size: usize,
        q: *const c_void,
        out: *mut c_void,
        lse: *mut f32,
        sinks: *const f32,
        alibi: *const f32,
        cancel: *const AtomicI32,
        q_token_stride: i64,
        q_head_stride: i64,
        out_token_stride: i64,
        out_head_stride: i64,
        lse_token_stride: i64,
        lse_head_stride: i64,
        q_type: i32,
        scale: f32,
        softcap: f32,
        put: *const kvc_put_args,
        tokens_per_sequence: i32,
        q_batch_stride: i64,
        out_batch_stride: i64,
        lse_batch_stride: i64,
        chosen: *const kvc_chosen,
        prior_out: *const c_void,
        prior_lse: *const f32,
        out_is_f32: i32,
    }

    struct kvc_masked {
        seq_id: i64,
        begin: i32,
        end: i32,
    }

    struct kvc_plan_args {
        struct_size: usize,
        layer: i32,
        first: i32,
        num_tokens: i32,
        num_heads: i32,
        num_threads: i32,
        non_causal: *const u8,
        masked: *const kvc_masked,
        masked_size: usize,
        num_masked: i32,
        max_chosen: i32,
        num_choices: i32,
        select_rows: i32,
        chosen_width: i32,
        precision: i32,
    }

    fn kvc_last_error() -> *const c_char;
    fn kvc_cache_new(config: *const kvc_config, cache: *mut *mut kvc_cache) -> kvc_status;
    fn kvc_cache_free(cache: *mut kvc_cache) -> kvc_status;
    fn kvc_next_position(cache: *mut kvc_cache, seq_id: i64) -> i32;
    fn kvc_begin(cache: *mut kvc_cache, num_tokens: i32, positions: *const i32, seq_ids: *const i64,
                 parents: *const i32, batch: *mut *mut kvc_batch) -> kvc_status;
    fn kvc_attend(batch: *mut kvc_batch, plan: *const kvc_plan_args, args: *const kvc_attend_args) -> kvc_status;
    fn kvc_commit(batch: *mut kvc_batch) -> kvc_status;
    fn kvc_abort(batch: *mut kvc_batch);
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    const HEADER: &str = include_str!("../../../include/kvcache.h");

    /// Assertions for a C compiler about one struct of the header.
    pub struct Struct {
        name: &'static str,
        assertions: Vec<String>,
        values: Vec<&'static str>,
    }

    impl Struct {
        pub fn new(name: &'static str, size: usize) -> Self {
            let assertion = format!("_Static_assert(sizeof({name}) == {size}, \"size of {name}\");\n");
            Struct { name, assertions: vec![assertion], values: Vec::new() }
        }

        pub fn field(&mut self, field: &str, rust_type: &str, offset: usize) {
            let (name, pointer) = (self.name, pointer_to(rust_type));
            self.assertions.push(format!(
                "_Static_assert(offsetof({name}, {field}) == {offset}, \"offset of {name}.{field}\");\n\
                 _Static_assert(_Generic(&(({name} *)0)->{field}, {pointer}: 1, default: 0), \"{name}.{field}\");\n"
            ));
            self.values.push(if rust_type.starts_with("kvc_") || rust_type.starts_with('[') { "{0}" } else { "0" });
        }

        /// One value for each field, so that the compiler counts them: a field added in padding moves no other field.
        pub fn finish(self) -> String {
            let whole = format!("const {0} all_of_{0} = {{{1}}};\n", self.name, self.values.join(", "));
            self.assertions.concat() + &whole
        }
    }

    /// A second declaration of a function, which the compiler refuses unless it agrees with the header's.
    pub fn function(name: &str, arguments: &[&str], result: Option<&&str>) -> String {
        let arguments: Vec<_> = arguments.iter().map(|argument| c_type(argument)).collect();
        let arguments = if arguments.is_empty() { "void".into() } else { arguments.join(", ") };
        format!("{} {name}({arguments});\n", result.map_or("void".into(), |result| c_type(result)))
    }

    fn pointer_to(rust: &str) -> String {
        match rust.strip_prefix('[').and_then(|array| array.strip_suffix(']')?.split_once("; ")) {
            Some((item, length)) => format!("{} (*)[{length}]", c_type(item)),
            None => c_type(rust) + " *",
        }
    }

    fn c_type(rust: &str) -> String {
        if let Some(target) = rust.strip_prefix("*const ") {
            return c_type(target) + " const *";
        }
        if let Some(target) = rust.strip_prefix("*mut ") {
            return c_type(target) + " *";
        }
        match rust {
            "i32" => "int32_t",
            "i64" => "int64_t",
            "u8" => "uint8_t",
            "usize" => "size_t",
            "f32" => "float",
            "f64" => "double",
            "c_char" => "char",
            "c_void" => "void",
            "AtomicI32" => "volatile int32_t",
            of_the_header => of_the_header,
        }
        .into()
    }

    /// Has the C compiler compare these declarations with a header; returns its messages as the error.
    fn compare(header: &str) -> Result<(), String> {
        let mut words = env!("KVCACHE_CC").split_whitespace();
        let mut compiler = Command::new(words.next().expect("CC names a compiler"))
            .args(words)
            .arg(concat!("-I", env!("CARGO_MANIFEST_DIR"), "/../../include"))
            .args(["-std=c11", "-Werror", "-Wmissing-field-initializers", "-fsyntax-only", "-x", "c", "-"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a C compiler that runs");
        let status = "_Static_assert(sizeof(kvc_status) == sizeof(int32_t), \"size of kvc_status\");\n";
        let program = [header, status, &super::assertions()].concat();
        compiler.stdin.take().unwrap().write_all(program.as_bytes()).expect("a compiler that reads");
        let done = compiler.wait_with_output().expect("a compiler that ends");
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        done.status.success().then_some(()).ok_or(said)
    }

    #[test]
    fn declarations_are_those_of_the_header() {
        compare(HEADER).unwrap();
    }

    #[test]
    fn a_change_of_the_header_is_noticed() {
        for (from, to, noticed) in [
            ("KVC_F16 = 1", "KVC_F16 = 5", "KVC_F16"),
            ("KVC_ERR_FULL, 3", "KVC_ERR_FULL, 30", "KVC_ERR_FULL"),
            ("int32_t window;", "int64_t window;", "size of kvc_policy"),
            ("int32_t kind; ", "uint32_t kind; ", "kvc_policy.kind"),
            (
                "    int32_t resume_window;",
                "    int32_t max_rows, resume_window;",
                "offset of kvc_policy.resume_window",
            ),
            ("const void *q; ", "const float *q; ", "kvc_attend_args.q"),
            (
                "q_token_stride, q_head_stride",
                "q_head_stride, q_token_stride",
                "offset of kvc_attend_args.q_token_stride",
            ),
            // in the padding before a pointer, where it moves no field
            ("int32_t num_threads; /* tasks", "int32_t num_threads, step; /* tasks", "kvc_plan_args"),
            ("int32_t num_layers;\n", "int32_t count_layers;\n", "num_layers"),
            ("kvc_commit(kvc_batch *batch)", "kvc_commit(kvc_cache *batch)", "kvc_commit"),
            ("kvc_begin(kvc_cache *cache, int32_t", "kvc_begin(kvc_cache *cache, int64_t", "kvc_begin"),
            ("void kvc_abort", "kvc_status kvc_abort", "kvc_abort"),
        ] {
            assert!(HEADER.contains(from), "the header has no {from:?}");
            let said = compare(&HEADER.replacen(from, to, 1)).expect_err(to);
            assert!(said.contains(noticed), "{from:?} became {to:?}, and the compiler said {said}");
        }
    }
}
