/* Strides of callers' arrays: which ones an output may have, against bytes that are marked one by one. */
#include "cache/check.h"
#include "support/test.h"

enum { MIDDLE = 600, AXES = KVC_MOST_AXES };

/* Whether two rows share bytes. */
static int overlaps(const int64_t strides[AXES], const int64_t nums[AXES], int64_t row_bytes) {
    static uint8_t marks[2 * MIDDLE];
    memset(marks, 0, sizeof marks);
    for (int64_t b = 0; b < nums[2]; b++)
        for (int64_t t = 0; t < nums[1]; t++)
            for (int64_t h = 0; h < nums[0]; h++)
                for (int64_t i = 0; i < row_bytes; i++)
                    if (marks[MIDDLE + h * strides[0] + t * strides[1] + b * strides[2] + i]++) return 1;
    return 0;
}

/* Whether each axis has room for the axes of smaller strides, in one of the six orders. */
static int is_nested(const int64_t strides[AXES], const int64_t nums[AXES], int64_t row_bytes) {
    static const int orders[][AXES] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    for (int o = 0; o < 6; o++) {
        int64_t extent = row_bytes;
        int fits = 1;
        for (int i = 0; i < AXES; i++) {
            const int axis = orders[o][i];
            const int64_t step = strides[axis] < 0 ? -strides[axis] : strides[axis];
            if (nums[axis] == 1) continue;
            fits &= step >= extent;
            extent += (nums[axis] - 1) * step;
        }
        if (fits) return 1;
    }
    return 0;
}

static void test_random_strides(void) {
    int num_refused = 0, num_interleaved = 0;
    for (int round = 0; round < 200000; round++) {
        int64_t strides[AXES], given[AXES], nums[AXES], row_bytes = random_int(1, 5);
        for (int i = 0; i < AXES; i++) {
            strides[i] = random_int(1, i ? 40 : 8) * (random_int(0, 3) ? 1 : -1);
            given[i] = strides[i];
            nums[i] = random_int(1, 5);
        }
        const kvc_array array = {
            .name = "array",
            .data = strides,
            .is_output = 1,
            .element_bytes = 1,
            .length = row_bytes,
            .axes = {{"heads", &given[0], nums[0]}, {"tokens", &given[1], nums[1]}, {"batches", &given[2], nums[2]}}};
        const int is_refused = kvc_resolve_array(&array) != KVC_OK, is_shared = overlaps(strides, nums, row_bytes);
        CHECK(!memcmp(strides, given, sizeof given));
        CHECKF(is_refused || !is_shared, "%d, %d, %d", (int)strides[0], (int)strides[1], (int)strides[2]);
        CHECK(is_refused == !is_nested(strides, nums, row_bytes));
        num_refused += is_refused;
        num_interleaved += is_refused && !is_shared;
    }
    CHECKF(num_refused < 150000 && num_interleaved < num_refused / 4, "%d of %d interleave", num_interleaved,
           num_refused);
}

/* Strides that overflow, in arrays that no memory holds, are resolved or refused. */
static void test_extremes(void) {
    static const int64_t extremes[] = {INT64_MIN, INT64_MIN + 4, -4, 0, 4, INT64_MAX - 3};
    for (int i = 0; i < 6 * 6 * 6; i++) {
        int64_t strides[AXES] = {extremes[i % 6], extremes[i / 6 % 6], extremes[i / 36]};
        const kvc_array array = {
            .name = "array",
            .data = strides,
            .is_output = 1,
            .element_bytes = 4,
            .length = INT64_MAX,
            .axes = {{"heads", &strides[0], 7}, {"tokens", &strides[1], INT64_MAX}, {"batches", &strides[2], 3}}};
        (void)kvc_resolve_array(&array);
    }
}

int main(void) {
    test_random_strides();
    test_extremes();
    return test_result();
}
