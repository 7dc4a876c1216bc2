/* wire.c: records between the two ends of a virtual machine's serial port. */
#ifndef SKERRY_WIRE_H
#define SKERRY_WIRE_H

#include "launch.h"

enum {
    WIRE_HELLO = 1, /* machine to host: it has booted */
    WIRE_STEPS,     /* host to machine: struct sk_wire_start, then the steps */
    WIRE_TELL,      /* machine to host: an answer, as to the daemon */
    WIRE_OOM,       /* machine to host: u64, how many processes its kernel has killed for want of memory */
    WIRE_OPEN,      /* host to machine: a new connection, which replaces an earlier one */
    WIRE_DATA,      /* both ways: bytes of the connection */
    WIRE_CLOSE,     /* both ways: its end */
};
enum { WIRE_MAX = 192 * 1024, WIRE_OTHERS = 2, WIRE_SEED = 64 };

struct sk_wire_start {
    uint64_t now; /* nanoseconds since 1970 */
    uint8_t seed[WIRE_SEED];
};

struct sk_wire_side {
    bool (*record)(uint8_t kind, uint32_t serial, const uint8_t *payload, size_t len); /* false ends the loop */
    void (*before_data)(void); /* what must be told before more of the connection's bytes; may be NULL */
    struct {
        int *fd; /* negative: nothing */
        bool (*ready)(void);
        bool last; /* only when the connection has nothing to read */
    } other[WIRE_OTHERS];
};

void sk_wire_open(int fd);
bool sk_wire_send(uint8_t kind, uint32_t serial, const void *payload, size_t len); /* false: broken, or no room */
void sk_wire_connect(int fd, uint32_t serial); /* the connection from now on; takes the descriptor */
bool sk_wire_unread(void); /* whether the connection has something to read */
void sk_wire_run(const struct sk_wire_side *side); /* returns when the stream has ended, or a callback said so */
void sk_wire_flush(void); /* waits until the other side has what was sent */
size_t sk_wire_await(uint8_t kind, const uint8_t **payload); /* the next record, which must be of that kind */

#endif
