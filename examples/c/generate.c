/* generate.c: continues a text with a small Llama, always with the likeliest token.
 *
 * A runner in C on kvcache.h.  Begin reading here: attention.c uses the cache, model.c reads the model's files and
 * multiplies, pool.c has the threads. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"

const char program[] = "generate";

typedef struct options {
    const char *prompt, *model, *second; /* second: a second argument, before which the first one is the model */
    int num_tokens, type, num_threads, use_openmp, window, help;
} options;

static const char *const usage =
    "usage: generate [MODEL] [PROMPT] [OPTIONS]\n"
    "\n"
    "Continues a prompt with a byte-level Llama, always by the likeliest token.\n"
    "\n"
    "  MODEL           folder with config.json and model.safetensors (default: examples/model)\n"
    "  PROMPT          text to continue (default: ROMEO:); a single argument is the prompt\n"
    "  --model MODEL   the same as the argument MODEL\n"
    "  --tokens N      how many to generate, such as 300 or 2k (default: 300)\n"
    "  --dtype TYPE    element type of the cache: f32, f16, bf16, q8_0, ... (default: f16)\n"
    "  --threads N     how many threads (default: as many as the library would use)\n"
    "  --openmp        OpenMP's threads, in the program and in the library, and not the program's own\n"
    "  --window N      each token sees the last N only, and the text may go on beyond the model's context\n"
    "  --help          this text\n";

/* ---- options ----------------------------------------------------------------------------------------------------- */

static int shift_of(char unit) { return unit == 'k' || unit == 'K' ? 10 : unit == 'm' || unit == 'M' ? 20 : 0; }

/* Reads a number such as 8192, 8k or 1M. */
static int read_int(const char *name, const char *text, int most, int *number) {
    char *end = NULL;
    long value = text ? strtol(text, &end, 10) : 0;
    if (text && end != text && *end) {
        const int shift = shift_of(*end++);
        value = !shift || value > most >> shift ? 0 : value * (1L << shift);
    }
    if (!text || end == text || *end || value < 1 || value > most)
        return fail("%s must be a whole number from 1 to %d, not %s", name, most, text ? text : "missing");
    *number = (int)value;
    return 0;
}

static int read_type(const char *text, int *type) {
    char known[256] = "";
    for (int i = 0; kvc_type_name(i); i++) {
        if (text && !strcmp(text, kvc_type_name(i))) return *type = i, 0;
        snprintf(known + strlen(known), sizeof known - strlen(known), " %s", kvc_type_name(i));
    }
    return fail("--dtype must be one of%s, not %s", known, text ? text : "missing");
}

/* Reads one option and its value, if any; *used is how many of the two arguments it took. */
static int read_option(options *o, const char *name, const char *value, int *used) {
    *used = 2;
    if (!strcmp(name, "--tokens")) return read_int(name, value, 1000000000, &o->num_tokens);
    if (!strcmp(name, "--threads")) return read_int(name, value, 256, &o->num_threads);
    if (!strcmp(name, "--window")) return read_int(name, value, 1 << 30, &o->window);
    if (!strcmp(name, "--dtype")) return read_type(value, &o->type);
    if (!strcmp(name, "--model")) return (o->model = value) ? 0 : fail("--model needs a folder");
    *used = 1;
    if (!strcmp(name, "--help")) return o->help = 1, 0;
    if (!strcmp(name, "--openmp")) return o->use_openmp = 1, 0;
    if (!strncmp(name, "--", 2)) return fail("there is no option %s; --help tells which there are", name);
    if (o->second) return fail("%s is an argument too many: quotes make one prompt of several words", name);
    *(o->prompt ? &o->second : &o->prompt) = name;
    return 0;
}

static int order_arguments(options *o) {
    if (o->second && o->model) return fail("the model is given twice, as %s and as %s", o->prompt, o->model);
    if (o->second) o->model = o->prompt, o->prompt = o->second;
    if (!o->prompt) o->prompt = "ROMEO:";
    if (!o->model) o->model = "examples/model";
    return *o->prompt ? 0 : fail("the prompt is empty");
}

static int read_options(options *o, int argc, char **argv) {
    *o = (options){.num_tokens = 300, .type = KVC_F16, .num_threads = kvc_num_threads()};
    int status = 0;
    for (int i = 1, used; i < argc && !status; i += used)
        status = read_option(o, argv[i], i + 1 < argc ? argv[i + 1] : NULL, &used);
#if !defined(_OPENMP)
    if (!status && o->use_openmp) status = fail("--openmp: this program was built without OpenMP");
#endif
    return status ? status : order_arguments(o);
}

/* ---- generating -------------------------------------------------------------------------------------------------- */

/* Appends tokens, at most BATCH in a forward pass; leaves the logits of the last one in s. */
static int feed(attention *a, state *s, const unsigned char *tokens, size_t num_tokens) {
    const model *m = a->m;
    for (size_t done = 0; done < num_tokens;) {
        const int n = num_tokens - done < BATCH ? (int)(num_tokens - done) : BATCH;
        int status = attention_begin(a, n);
        if (status) return status;
        model_embed(m, s, tokens + done, n);
        for (int layer = 0; layer < m->num_layers && !status; layer++) {
            model_qkv(m, s, a->pool, layer, n);
            status = attention_attend(a, layer, n, s->qkv, s->attended);
            model_finish(m, s, a->pool, layer, n);
        }
        status = attention_end(a, status);
        if (status) return status;
        done += (size_t)n;
        if (done == num_tokens) model_logits(m, s, a->pool, n);
    }
    return 0;
}

static int generate(attention *a, state *s, const options *o) {
    const int context = a->m->max_seq_len;
    size_t length = strlen(o->prompt);
    fputs(o->prompt, stdout);
    int status = feed(a, s, (const unsigned char *)o->prompt, length);
    for (int left = o->num_tokens; !status; length++) {
        const unsigned char token = likeliest(s->logits);
        putchar(token);
        if (fflush(stdout)) return fail("the text cannot be written");
        if (--left == 0) break;
        if (!o->window && length + 1 == (size_t)context) {
            fprintf(stderr, "(stopped at %d tokens, the model's whole context; with a window it would go on)\n",
                    context);
            break;
        }
        status = feed(a, s, &token, 1);
    }
    putchar('\n');
    return status;
}

static int check_length(const options *o, const model *m) {
    if (o->window > m->max_seq_len)
        return fail("--window is %d: it may be at most the model's context, %d", o->window, m->max_seq_len);
    if (!o->window && strlen(o->prompt) >= (size_t)m->max_seq_len)
        return fail("the prompt of %zu tokens leaves no room in the model's context of %d", strlen(o->prompt),
                    m->max_seq_len);
    return 0;
}

int main(int argc, char **argv) {
    options o;
    model m = {0};
    state s = {0};
    attention a = {0};
    pool *p = NULL;
    int status = read_options(&o, argc, argv);
    if (!status && o.help) return fputs(usage, stdout) < 0;
    if (!status) status = model_read(&m, o.model);
    if (!status) status = check_length(&o, &m);
    if (!status && !state_init(&s, &m)) status = fail("out of memory for a batch of %d tokens", BATCH);
    if (!status && !(p = pool_new(o.num_threads, o.use_openmp)))
        status = fail("there cannot be %d threads", o.num_threads);
    if (!status) status = attention_init(&a, &m, p, o.num_threads, o.use_openmp, o.type, o.window);
    if (!status) status = generate(&a, &s, &o);
    attention_destroy(&a);
    pool_free(p);
    state_destroy(&s);
    model_free(&m);
    return status;
}
