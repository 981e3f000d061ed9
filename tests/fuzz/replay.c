/* replay.c: runs a fuzzer's function on inputs, and on alterations of them by chance.
 *
 *     replay NUM FILE [SEED]    each line of the file, in hexadecimal digits, as it is and altered NUM times, otherwise
 *                               with another seed
 */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include "fuzz.h"

enum { MOST_BYTES = 1 << 12 };

static size_t read_line(FILE *file, uint8_t *to) {
    size_t size = 0;
    unsigned byte;
    for (int c = fgetc(file); c != '\n' && c != EOF; c = fgetc(file)) {
        ungetc(c, file);
        if (size == MOST_BYTES || fscanf(file, "%2x", &byte) != 1) exit(2);
        to[size++] = (uint8_t)byte;
    }
    return size;
}

/* Alters some bits, or cuts the end off; returns the new size. */
static size_t alter_input(uint8_t *input, size_t size) {
    for (int n = random_int(1, 8); size && n; n--) input[random_bits() % size] ^= (uint8_t)(1 << random_int(0, 8));
    return random_int(0, 4) ? size : (size_t)(random_bits() % (size + 1));
}

int main(int argc, char **argv) {
    static uint8_t input[MOST_BYTES], altered[MOST_BYTES];
    FILE *file = argc == 3 || argc == 4 ? fopen(argv[2], "r") : NULL;
    uint64_t chance = argc == 4 ? strtoull(argv[3], NULL, 10) : 1; /* the fuzzers set random_state as well */
    if (!file) return 2;
    for (size_t size; (size = read_line(file, input));) {
        LLVMFuzzerTestOneInput(input, size);
        for (long n = strtol(argv[1], NULL, 10); n; n--) {
            random_state = chance;
            memcpy(altered, input, size);
            const size_t rest = alter_input(altered, size);
            chance = random_state;
            LLVMFuzzerTestOneInput(altered, rest);
        }
    }
    fclose(file);
    return 0;
}
