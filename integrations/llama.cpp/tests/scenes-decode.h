// Scenes of decoding: ubatches, several sequences in a batch, coupled tokens, causality, embeddings, drafts.
#pragma once

#include "scene.h"

// 300 tokens in one call, then one by one
inline void scene_prompt(scene_run &run) {
    auto prompt = run.tokens(1, 0, 300, {0}, 0);

    for (size_t i = 0; i < prompt.size(); i += 37) {
        prompt[i].has_logits = true;
    }

    run.feed("prompt", prompt);
    for (int i = 300; i < 310; ++i) {
        run.feed("token", 0, 1, i, i + 1);
    }
    run.note_positions("end");
}

// four sequences whose tokens alternate in the batch
inline void scene_interleaved(scene_run &run) {
    scene_batch batch;

    for (int i = 0; i < 30; ++i) {
        for (llama_seq_id s = 0; s < 4; ++s) {
            batch.push_back({text_token(run.model, s, i), i, {s}, i % 10 == 9});
        }
    }

    run.feed("interleaved", batch);

    // sequences of different length in one batch
    scene_batch uneven;

    for (llama_seq_id s = 0; s < 4; ++s) {
        auto tail = run.tokens(s, 30, 31 + 5 * s, {s}, 30);

        tail.back().has_logits = true;
        uneven.insert(uneven.end(), tail.begin(), tail.end());
    }

    run.feed("uneven", uneven);
    run.note_positions("end");
}

// as llama-perplexity scores answers: what they have in common belongs to four sequences, then each has its own
inline void scene_coupled(scene_run &run) {
    auto batch = run.tokens(1, 0, 20, {0, 1, 2, 3}, 0);

    batch.back().has_logits = true;
    for (llama_seq_id s = 0; s < 4; ++s) {
        auto tail = run.tokens(10 + s, 20, 24 + s, {s}, 20);

        tail.front().has_logits = true;
        tail.back().has_logits = true;
        batch.insert(batch.end(), tail.begin(), tail.end());
    }

    run.feed("answers", batch);
    run.note_positions("answers");

    llama_memory_clear(run.mem, true);

    // across calls, and in sets that narrow: all, two pairs, each alone
    run.feed("all", run.tokens(1, 0, 70, {0, 1, 2, 3}, 0));

    batch = run.tokens(2, 70, 75, {2, 1}, 70);
    for (auto &token : run.tokens(3, 70, 78, {0, 3}, 70)) {
        batch.push_back(token);
    }
    batch.back().has_logits = true;
    run.feed("pairs", batch);
    run.note_positions("pairs");

    for (llama_seq_id s = 0; s < 4; ++s) {
        run.feed("alone", s, 4, llama_memory_seq_pos_max(run.mem, s) + 1, 80 + s);
    }
    run.note_positions("alone");
}

// tokens of a draft are verified together, and the rejected ones taken back
inline void scene_draft(scene_run &run) {
    run.feed("prompt", 0, 1, 0, 150);

    int n_past = 150;

    for (int step = 0; step < 40; ++step) {
        const int n_draft = 1 + step * 7 % 16;
        const int n_accepted = step * 5 % (n_draft + 1);

        auto draft = run.tokens(20 + step, 0, n_draft, {0}, n_past);

        for (auto &token : draft) {
            token.has_logits = true;
        }

        run.feed("draft", draft);
        n_past += n_accepted;
        run.note("taken back", llama_memory_seq_rm(run.mem, 0, n_past, -1));
        run.note("pos_max", llama_memory_seq_pos_max(run.mem, 0));
    }
}

// prompts that see all of themselves, between prompts that do not
inline void scene_causality(scene_run &run) {
    for (const bool is_causal : {false, true, false}) {
        llama_memory_clear(run.mem, true);
        llama_set_causal_attn(run.ctx, is_causal);

        auto batch = run.tokens(1, 0, 20, {0}, 0);

        for (auto &token : run.tokens(2, 0, 30, {1}, 0)) {
            batch.push_back(token);
        }
        for (auto &token : batch) {
            token.has_logits = true;
        }

        run.feed(is_causal ? "causal" : "not causal", batch);
    }

    llama_set_causal_attn(run.ctx, true);
    run.feed("goes on", 0, 1, 20, 25);
}

// embeddings of three sequences of one batch
inline void scene_embeddings(scene_run &run) {
    scene_batch batch;

    for (llama_seq_id s = 0; s < 3; ++s) {
        for (auto &token : run.tokens(s, 0, 10 + 7 * s, {s}, 0)) {
            batch.push_back(token);
            batch.back().has_logits = true;
        }
    }

    run.note("decode", run.decode(batch));
    for (llama_seq_id s = 0; s < 3; ++s) {
        run.note_row("embedding of " + std::to_string(s), llama_get_embeddings_seq(run.ctx, s),
                     llama_model_n_embd_out(run.model));
    }
}
