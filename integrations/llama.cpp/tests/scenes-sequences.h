// Scenes of edits: sequences are copied, cut, moved and divided, and go on.
#pragma once

#include "scene.h"

// every sequence goes on by two tokens of its own
inline void go_on(scene_run &run, const std::string &label, std::vector<llama_seq_id> seq_ids) {
    run.note_positions(label);
    for (const auto s : seq_ids) {
        const int next = llama_memory_seq_pos_max(run.mem, s) + 1;

        run.feed(label + ", sequence " + std::to_string(s), s, 100 + s, next, next + 2);
    }
}

// sequences are copied whole
inline void scene_forks(scene_run &run) {
    run.feed("prompt", 0, 1, 0, 40);

    llama_memory_seq_cp(run.mem, 0, 1, -1, -1);
    go_on(run, "forked", {1, 0, 1});

    llama_memory_seq_cp(run.mem, 1, 2, -1, -1);
    llama_memory_seq_cp(run.mem, 0, 3, 0, -1);
    llama_memory_seq_cp(run.mem, 0, 0, -1, -1);
    go_on(run, "forked again", {0, 1, 2, 3});

    llama_memory_seq_rm(run.mem, 0, -1, -1);
    go_on(run, "the first is gone", {1, 2, 3});
}

// parts of sequences are copied, also into sequences that hold something
inline void scene_ranges(scene_run &run) {
    run.feed("prompt", 0, 1, 0, 60);

    llama_memory_seq_cp(run.mem, 0, 1, 0, 20);
    go_on(run, "a prefix", {1, 0});

    llama_memory_seq_cp(run.mem, 0, 2, 10, 30);
    go_on(run, "from the middle", {2, 0});

    run.note("cut", llama_memory_seq_rm(run.mem, 1, 20, -1));
    llama_memory_seq_cp(run.mem, 0, 1, 20, 50);
    go_on(run, "into what holds something", {1, 0});

    llama_memory_seq_cp(run.mem, 0, 3, 30, 30);
    llama_memory_seq_cp(run.mem, 0, 3, 90, 95);
    llama_memory_seq_cp(run.mem, 3, 0, -1, -1);
    go_on(run, "nothing", {0});
}

// sequences are cut at the end, in the middle, everywhere
inline void scene_cuts(scene_run &run) {
    run.feed("prompt", 0, 1, 0, 60);
    llama_memory_seq_cp(run.mem, 0, 1, -1, -1);
    run.feed("another", 2, 2, 0, 20);

    for (const auto &range : std::vector<std::pair<int, int>>{{30, 30}, {40, 30}, {55, -1}, {20, 25}, {90, 99}}) {
        run.note("cut", llama_memory_seq_rm(run.mem, 0, range.first, range.second));
        go_on(run, "cut", {0, 1});
    }

    run.note("all sequences", llama_memory_seq_rm(run.mem, -1, 15, 18));
    go_on(run, "all sequences", {0, 1, 2});
    run.note("all ends", llama_memory_seq_rm(run.mem, -1, 50, -1));
    go_on(run, "all ends", {0, 1, 2});
    run.note("one sequence", llama_memory_seq_rm(run.mem, 1, -1, -1));
    go_on(run, "one sequence", {0, 2});

    if (run.is_unified()) {
        llama_memory_seq_keep(run.mem, 2);
        go_on(run, "kept", {2});
    }

    run.note("everything", llama_memory_seq_rm(run.mem, -1, -1, -1));
    run.note_positions("everything");
    run.feed("anew", 3, 3, 0, 10);
}

// edits of sequences that hold nothing change nothing, and are no errors
inline void scene_nothing(scene_run &run) {
    const int n_before = scene_errors;

    const auto edit = [&]() {
        for (const auto &range : std::vector<std::pair<int, int>>{{-1, -1}, {0, 5}, {3, -1}, {4, 4}}) {
            llama_memory_seq_cp(run.mem, 0, 1, range.first, range.second);
            run.note("cut", llama_memory_seq_rm(run.mem, 0, range.first, range.second));
            llama_memory_seq_add(run.mem, 0, range.first, range.second, 2);
            llama_memory_seq_div(run.mem, 0, range.first, range.second, 2);
        }
        run.note("errors", scene_errors - n_before);
        run.note_positions("nothing");
    };

    edit();
    llama_memory_seq_keep(run.mem, 0);
    edit();
    run.feed("prompt", 1, 1, 0, 20);
    edit();
    go_on(run, "nothing", {1, 0});
}

// half of a full context goes, and the rest moves down, until it was refilled three times
inline void scene_context_shift(scene_run &run) {
    const int n_ctx = (int)llama_n_ctx_seq(run.ctx);
    const int n_keep = 8;

    run.note("can shift", llama_memory_can_shift(run.mem));
    if (!llama_memory_can_shift(run.mem)) {
        return;
    }

    int n_past = 0;

    for (int text = 0; text < 3 * n_ctx; text += 16) {
        if (n_past + 16 > n_ctx) {
            const int n_discard = (n_past - n_keep) / 2;

            run.note("cut", llama_memory_seq_rm(run.mem, 0, n_keep, n_keep + n_discard));
            llama_memory_seq_add(run.mem, 0, n_keep + n_discard, n_past, -n_discard);
            n_past -= n_discard;
            run.note_positions("shifted");
        }

        auto batch = run.tokens(1, text, text + 16, {0}, n_past);

        batch.back().has_logits = true;
        run.feed("text", batch);
        n_past += 16;
    }
}

// a sequence of its own moves away and back, and a part of it up
inline void scene_moves(scene_run &run) {
    if (!llama_memory_can_shift(run.mem)) {
        return;
    }

    run.feed("prompt", 0, 1, 0, 60);
    run.feed("another", 1, 2, 0, 30);

    llama_memory_seq_add(run.mem, 0, -1, -1, 1000);
    go_on(run, "away", {0, 1});
    llama_memory_seq_add(run.mem, 0, 0, -1, -1000);
    go_on(run, "back", {0, 1});
    llama_memory_seq_add(run.mem, 0, 0, -1, -10);
    go_on(run, "below 0", {0, 1});
    llama_memory_seq_add(run.mem, 0, 20, 20, 5);
    llama_memory_seq_add(run.mem, 0, 20, -1, 0);
    go_on(run, "not at all", {0, 1});
    run.note("cut", llama_memory_seq_rm(run.mem, 0, 20, 30));
    llama_memory_seq_add(run.mem, 0, 30, -1, -10);
    go_on(run, "closed", {0, 1});
}

// Divides positions.  llama.cpp's own turns the keys the wrong way (llama_kv_cells::pos_div adds the old position and
// takes the new one off), so that its tokens are moved there one by one.
inline void divide(scene_run &run, llama_pos begin, llama_pos end, int divisor) {
    if (run.is_ours) {
        llama_memory_seq_div(run.mem, 0, begin, end, divisor);
        return;
    }

    for (llama_pos p = begin; p < end; ++p) {
        llama_memory_seq_add(run.mem, 0, p, p + 1, p / divisor - p);
    }
}

// self-extend: groups of four tokens get one position, as examples/passkey does it
inline void scene_division(scene_run &run) {
    if (!llama_memory_can_shift(run.mem)) {
        return;
    }

    run.feed("prompt", 0, 1, 0, 64);
    llama_memory_seq_cp(run.mem, 0, 1, -1, -1);
    llama_memory_seq_rm(run.mem, 1, -1, -1);

    llama_memory_seq_add(run.mem, 0, 32, 64, 16);
    divide(run, 48, 80, 4);
    go_on(run, "divided", {0});
    divide(run, 0, llama_memory_seq_pos_max(run.mem, 0) + 1, 1);
    divide(run, 0, 12, 2);
    go_on(run, "divided again", {0});
}

// the positions that llama.cpp's own has after a division
inline void scene_divided_positions(scene_run &run) {
    if (!llama_memory_can_shift(run.mem)) {
        return;
    }

    run.feed("prompt", 0, 1, 0, 64);
    llama_memory_seq_div(run.mem, 0, 48, 60, 7);
    run.note_positions("divided");
    llama_memory_seq_div(run.mem, 0, -1, -1, 3);
    run.note_positions("all divided");
}

// what does not fit is refused as a whole, and what fits goes on
inline void scene_full(scene_run &run) {
    const int n_ctx = (int)llama_n_ctx_seq(run.ctx);

    run.feed("prompt", 0, 1, 0, n_ctx - 20);
    run.note_positions("nearly full");
    run.feed("too many", 0, 1, n_ctx - 20, n_ctx + 1);
    run.note_positions("refused");
    run.feed("the last", 0, 1, n_ctx - 20, n_ctx);
    run.note_positions("full");
    run.feed("one more", 0, 1, n_ctx, n_ctx + 1);

    run.note("cut", llama_memory_seq_rm(run.mem, 0, n_ctx - 10, -1));
    run.feed("goes on", 0, 1, n_ctx - 10, n_ctx - 5);
    run.feed("too many again", 0, 1, n_ctx - 5, n_ctx + 5);
    run.feed("goes on again", 0, 1, n_ctx - 5, n_ctx);
    run.note_positions("end");
}

// four sequences share a small context, with and without a prompt in common
inline void scene_full_of_sequences(scene_run &run) {
    const int n_ctx = (int)llama_n_ctx(run.ctx);
    const int n_each = n_ctx / 4;

    for (llama_seq_id s = 0; s < 4; ++s) {
        run.feed("quarter", s, s, 0, n_each);
    }
    run.feed("one more", 2, 2, n_each, n_each + 1);
    run.note_positions("full");

    llama_memory_seq_rm(run.mem, 3, -1, -1);
    for (llama_seq_id s = 0; s < 3; ++s) {
        run.feed("the room of another", s, s, n_each, n_each + n_each / 4);
    }

    llama_memory_clear(run.mem, true);
    run.feed("prompt", 0, 1, 0, n_ctx / 2);
    for (llama_seq_id s = 1; s < 4; ++s) {
        llama_memory_seq_cp(run.mem, 0, s, -1, -1);
    }
    for (llama_seq_id s = 0; s < 4; ++s) {
        run.feed("shared", s, s, n_ctx / 2, n_ctx / 2 + n_ctx / 8);
    }
    run.feed("one more", 1, 1, n_ctx / 2 + n_ctx / 8, n_ctx / 2 + n_ctx / 8 + 1);
    run.note_positions("end");
}
