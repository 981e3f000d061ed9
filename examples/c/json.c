#include "json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { DEEPEST = 32 };

static const char *skip_space(const char *at, const char *end) {
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r')) at++;
    return at;
}

/* ---- where a value ends: NULL if it is not well formed ----------------------------------------------------------- */

static const char *string_end(const char *at, const char *end) {
    for (at++; at < end && (unsigned char)*at >= ' '; at++) {
        if (*at == '"') return at + 1;
        if (*at == '\\' && ++at == end) return NULL;
    }
    return NULL;
}

/* The end of a literal, or of a number, whose digits json_number checks. */
static const char *word_end(const char *at, const char *end) {
    static const char *const literals[] = {"true", "false", "null"};
    const char *last = at;
    while (last < end && strchr("+-.0123456789Eaeflnrstu", *last) && *last) last++;
    for (int i = 0; i < 3; i++)
        if (json_is_literal((json){at, last}, literals[i])) return last;
    double number;
    return json_number((json){at, last}, &number) ? last : NULL;
}

static const char *value_end(const char *at, const char *end, int depth) {
    if (at == end || depth > DEEPEST) return NULL;
    if (*at == '"') return string_end(at, end);
    if (*at != '{' && *at != '[') return word_end(at, end);
    const char closing = *at == '{' ? '}' : ']';
    at = skip_space(at + 1, end);
    if (at < end && *at == closing) return at + 1;
    while (at < end) {
        if (closing == '}') { /* "name": */
            if (*at != '"' || !(at = string_end(at, end))) return NULL;
            at = skip_space(at, end);
            if (at == end || *at != ':') return NULL;
            at = skip_space(at + 1, end);
        }
        if (!(at = value_end(at, end, depth + 1))) return NULL;
        at = skip_space(at, end);
        if (at < end && *at == closing) return at + 1;
        if (at == end || *at != ',') return NULL;
        at = skip_space(at + 1, end);
    }
    return NULL;
}

/* ---- walking it -------------------------------------------------------------------------------------------------- */

json json_read(const char *text, size_t size) {
    const char *end = text + size, *at = skip_space(text, end), *last = value_end(at, end, 0);
    return last && skip_space(last, end) == end ? (json){at, last} : (json){NULL, NULL};
}

int json_next(json parent, json *name, json *value) {
    if (!parent.at || (*parent.at != '{' && *parent.at != '[')) return 0;
    const char *at = skip_space(value->at ? value->end : parent.at + 1, parent.end);
    if (*at == ',') at = skip_space(at + 1, parent.end);
    *name = (json){NULL, NULL};
    if (*at == '}' || *at == ']') return 0;
    if (*parent.at == '{') {
        *name = (json){at, string_end(at, parent.end)};
        at = skip_space(skip_space(name->end, parent.end) + 1, parent.end); /* past the colon */
    }
    *value = (json){at, value_end(at, parent.end, 0)};
    return 1;
}

json json_member(json object, const char *name) {
    json found, value = {NULL, NULL};
    while (json_next(object, &found, &value))
        if (json_is_string(found, name) && !json_is_literal(value, "null")) return value;
    return (json){NULL, NULL};
}

int json_is_literal(json value, const char *text) {
    const size_t size = (size_t)(value.end - value.at);
    return value.at && size == strlen(text) && memcmp(value.at, text, size) == 0;
}

int json_is_string(json value, const char *text) {
    return value.at && *value.at == '"' && json_is_literal((json){value.at + 1, value.end - 1}, text);
}

int json_number(json value, double *number) {
    char digits[64];
    const size_t size = (size_t)(value.end - value.at);
    if (!value.at || size == 0 || size >= sizeof digits || !strchr("-0123456789", *value.at)) return 0;
    memcpy(digits, value.at, size);
    digits[size] = 0;
    char *end;
    *number = strtod(digits, &end);
    return *end == 0 && isfinite(*number);
}
