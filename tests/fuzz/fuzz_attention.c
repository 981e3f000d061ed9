/* fuzz_attention.c: an input decides on types, shapes, policies, lengths, moved, hidden, joined, chosen and selected
 * rows.  It also names an instruction set.  Attention is held against plain arithmetic (answers.h).  Once the input
 * ends, choices are random. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include "support/joining.h"
#include "support/selections.h"

#include "fuzz.h"

/* Hides up to three ranges of rows of each sequence.  If its tokens are a tree, only stored rows are hidden. */
static void hide_some(scene *s) {
    for (int m = 0; m < s->num_members; m++) {
        const member *who = &s->members[m];
        const int32_t first_new = position_of(s, m, who->num_stored),
                      end = s->is_tree ? first_new : position_of(s, m, who->num_stored + who->num_new - 1) + 1;
        for (int n = random_int(0, 4); n; n--) {
            const int32_t begin = random_int(0, end + 1);
            s->masked[s->num_masked++] = (kvc_masked){m, begin, random_int(begin, end + 1)};
        }
    }
}

/* Attends to rows that tokens choose. */
static void check_chosen(const scene *s, const setting *how) {
    stage *st = stage_new(s, how);
    question a = question_of_all(st);
    random_choice(st);
    const kvc_chosen given = choice_for(&a);
    a.args.chosen = &given;
    CHECKF(ask(&a) == KVC_OK, "%s", kvc_last_error());
    check_chosen_answers(&a);
    question_free(&a);
    stage_free(st);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static scene s;
    if (size < 2) return 0;
    let_input_decide(data, size, 1);
    s = random_scene(random_int(0, 1 << 20));
    if (random_int(0, 2)) add_stride(&s);
    if (random_int(0, 2)) hide_some(&s);
    const setting how = random_setting();
    if (random_int(0, 2)) {
        check_scene(&s, &how);
    } else if (random_int(0, 2)) {
        check_joined(&s, &how);
    } else if (random_int(0, 2)) {
        check_chosen(&s, &how);
    } else if (scene_stride(&s) == 1) {
        add_sketches(&s);
        check_selecting(&s, &how);
    }
    num_decisions = 0;
    fail_if_checks_failed();
    return 0;
}
