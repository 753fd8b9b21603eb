/* Text of HTTP. Its names and keywords are ASCII and compared without regard to case (RFC 9110 5.1); the functions of <strings.h> compare
 * by the rules of the process's locale, where a Turkish "I" is not an "i". */
#ifndef AQ_STREAM_TEXT_H
#define AQ_STREAM_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

struct text {
    const char *at;
    size_t size;
};

static inline char text_lower(char c)
{
    return c >= 'A' && c <= 'Z' ? (char)(c | 0x20) : c;
}

static inline bool text_equal(struct text a, struct text b)
{
    for (size_t i = 0; a.size == b.size && i < a.size; i++)
        if (text_lower(a.at[i]) != text_lower(b.at[i]))
            return false;
    return a.size == b.size;
}

static inline bool text_is(struct text t, const char *word)
{
    return text_equal(t, (struct text){word, strlen(word)});
}

static inline bool text_begins(struct text t, const char *word)
{
    size_t size = strlen(word);
    return t.size >= size && text_is((struct text){t.at, size}, word);
}

/* RFC 9110 5.6.2 */
static inline bool text_is_tchar(char c)
{
    bool letter = text_lower(c) >= 'a' && text_lower(c) <= 'z', digit = c >= '0' && c <= '9';
    return letter || digit || (c && strchr("!#$%&'*+-.^_`|~", c));
}

/* Without spaces and tabs at both ends. */
static inline struct text text_trimmed(struct text t)
{
    while (t.size && (t.at[0] == ' ' || t.at[0] == '\t'))
        t = (struct text){t.at + 1, t.size - 1};
    while (t.size && (t.at[t.size - 1] == ' ' || t.at[t.size - 1] == '\t'))
        t.size--;
    return t;
}

#endif
