/* libcurl as a connector: name lookup, and a connection to the first address that answers (RFC 8305). The socket then belongs to plain.c.
 */
#include "parts.h"

static void on_done(struct transfer *t, CURLcode code)
{
    if (code == CURLE_OK)
        plain_connected(t);
    else
        transfer_finish(t, code, CAUSE_NONE);
}

bool connect_begin(struct transfer *t)
{
    CURLcode code = handle_open(t, on_done);
    code = code ? code : handle_set(t, CURLOPT_CONNECT_ONLY, 1L);
    code = code ? code : handle_set(t, CURLOPT_BUFFERSIZE, 1024L); /* the smallest size: nothing is read through it */
    return handle_start(t, code);
}
