// Prompts in bytes: which tokens of a decode are attended to in bytes, and that others keep their bits.
//   test-kvcache-prompts MODEL...
#include "scene.h"

static const std::string EXACT = "exact";
static const std::string IN_BYTES = "in bytes";
static const int PROMPT = 640; // tokens that are in bytes over rows of int8, also with one query head

// feeds sequences n further tokens each, alternately, and notes the logits of the last ones
static void feed(scene_run &run, const std::vector<std::pair<llama_seq_id, std::string>> &seqs, int n) {
    scene_batch batch;

    for (int i = 0; i < n; ++i) {
        for (const auto &[seq_id, label] : seqs) {
            const llama_pos pos = llama_memory_seq_pos_max(run.mem, seq_id) + 1 + i;

            batch.push_back({text_token(run.model, seq_id, pos), pos, {seq_id}, i + 1 == n});
        }
    }

    run.note("decode", run.decode(batch));
    for (size_t i = 0; i < seqs.size(); ++i) {
        run.note_row(seqs[i].second, llama_get_logits_ith(run.ctx, (int32_t)(batch.size() - seqs.size() + i)),
                     llama_vocab_n_tokens(llama_model_get_vocab(run.model)));
    }
}

// a sequence reads in bytes where that is faster: not few tokens, and not the first ones
static void scene_prompts(scene_run &run) {
    feed(run, {{0, EXACT}}, 8);
    feed(run, {{0, EXACT}}, 1);
    feed(run, {{0, EXACT}}, 12);
    for (const llama_seq_id seq_id : {1, 2}) {
        feed(run, {{seq_id, IN_BYTES}}, PROMPT);
    }
    feed(run, {{1, IN_BYTES}, {2, IN_BYTES}}, 128);
    for (const llama_seq_id seq_id : {1, 2}) {
        llama_memory_seq_rm(run.mem, seq_id, -1, -1);
    }
    feed(run, {{1, EXACT}, {2, EXACT}}, 8);

    // a prompt beside a token
    auto batch = run.tokens(3, 0, PROMPT, {3}, 0);

    batch.back().has_logits = true;
    batch.push_back({text_token(run.model, 0, 21), 21, {0}, true});
    run.note("decode", run.decode(batch));
    for (const auto &[i, label] : {std::make_pair(PROMPT - 1, IN_BYTES), std::make_pair(+PROMPT, EXACT)}) {
        run.note_row(label, llama_get_logits_ith(run.ctx, i), llama_vocab_n_tokens(llama_model_get_vocab(run.model)));
    }
}

static bool test(llama_model *model, bool is_unified) {
    auto params = exact_params();

    params.n_ctx = 4 * 1024;
    params.n_batch = 1024;
    params.n_ubatch = 1024;
    params.kv_unified = is_unified;

    std::vector<scene_note> notes[2];

    for (const bool in_bytes : {false, true}) {
        setenv("LLAMA_KVCACHE_PROMPTS", in_bytes ? "int8" : "stored", 1);
        notes[in_bytes] = play(model, params, true, scene_prompts);
    }

    bool ok = notes[0].size() == notes[1].size() && notes[0].size() > 1;
    double least = 1.0;
    double most = 0.0;

    for (size_t i = 0; ok && i < notes[0].size(); ++i) {
        const auto &[label, value, row, _] = notes[1][i];
        const double error = row == notes[0][i].row ? 0.0 : nmse(row, notes[0][i].row);

        ok = value == notes[0][i].value && (label == "decode" ? value == 0 : !row.empty());
        if (label == IN_BYTES) {
            least = std::min(least, error);
            most = std::max(most, error);
        } else if (!(error == 0.0)) {
            printf("    note %zu: %.2g off, not exact\n", i, error);
            ok = false;
        }
    }
    ok = ok && least > 0.0 && most < 1e-2;
    printf("  %-4s %s (in bytes %.2g to %.2g off)\n", ok ? "ok" : "FAIL", is_unified ? "unified" : "not unified", least,
           most);

    return ok;
}

int main(int argc, char **argv) {
    bool ok = true;

    set_types("int8", "int8");

    const bool are_loaded =
        on_models(argc, argv, [&](llama_model *model) { ok = test(model, true) && test(model, false) && ok; });

    ok = ok && are_loaded;
    puts(ok ? "ok" : "FAIL");

    return !ok;
}
