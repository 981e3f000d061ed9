/* json.h: reads JSON where it lies.  Nothing is copied, changed or allocated.
 *
 * A json is the text of one value, inside a text that json_read has gone over: what walks it then need not fear that it
 * ends too early.  at is NULL where there is no such value. */
#ifndef JSON_H
#define JSON_H

#include <stddef.h>

typedef struct json {
    const char *at, *end;
} json;

/* The only value of the text; none if it is not well formed, or nested deeper than anybody would. */
json json_read(const char *text, size_t size);

/* Goes from member to member of an object, or from item to item of an array, where names are none; 0 after the last
 * one, or if it is neither.  *value, none before the first call, is where it stands. */
int json_next(json parent, json *name, json *value);

/* A member of an object; none if there is none of this name, or if it is null. */
json json_member(json object, const char *name);

/* Whether it is a string of these characters, or a literal: "true", "false", "null". */
int json_is_string(json value, const char *text);
int json_is_literal(json value, const char *text);

/* Whether it is a number, which then goes to *number. */
int json_number(json value, double *number);

#endif
