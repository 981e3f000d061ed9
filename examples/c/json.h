/* json.h: reads JSON where it lies.  Nothing is copied, changed or allocated.
 *
 * A json is the text of one value, inside a text that json_read has checked, so that walking it never passes its end.
 * at is NULL where there is no such value. */
#ifndef JSON_H
#define JSON_H

#include <stddef.h>

typedef struct json {
    const char *at, *end;
} json;

/* The only value of the text; none if it is not well formed, or nested too deeply. */
json json_read(const char *text, size_t size);

/* Steps through the members of an object, or the items of an array, which have no names; returns 0 after the last one,
 * or if it is neither.  *value is the current one; make it none before the first call. */
int json_next(json parent, json *name, json *value);

/* The member of an object with this name; none if it is missing or null. */
json json_member(json object, const char *name);

/* Whether it is a string of these characters, or a literal: "true", "false", "null". */
int json_is_string(json value, const char *text);
int json_is_literal(json value, const char *text);

/* Whether it is a number, which is then stored in *number. */
int json_number(json value, double *number);

#endif
