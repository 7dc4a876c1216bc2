/* The stream between a virtual machine's first process and the process that runs the machine: see launch.c.
 *
 * A virtual serial port has no connections, so a new one cannot be told from the old one's last bytes. The two ends
 * therefore talk in records, and each record of a connection carries its serial number: what belongs to an earlier
 * connection is dropped. A record is u32 length of what follows, u8 kind, u32 serial, payload; little endian.
 *
 * The other side is hostile: lengths are checked, and memory is bounded. A side that does not read
 * holds up only the sender of that direction. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "wire.h"

enum { HEADER = 9, SMALL = 4096 };

static int wire = -1, connection = -1;
static uint32_t current;
static uint8_t in[HEADER + WIRE_MAX], out[HEADER + WIRE_MAX + SMALL], inward[WIRE_MAX];
static size_t in_len, out_len, out_sent, inward_len, inward_sent;

void sk_wire_open(int fd)
{
    wire = fd;
}

/* False: the other side is gone. */
static bool flush(void)
{
    while (out_sent < out_len) {
        ssize_t n = write(wire, out + out_sent, out_len - out_sent);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN;
        out_sent += (size_t)n;
    }
    out_len = out_sent = 0;
    return true;
}

bool sk_wire_send(uint8_t kind, uint32_t serial, const void *payload, size_t len)
{
    if (sizeof out - out_len < HEADER + len)
        return false;
    sk_put32(out + out_len, (uint32_t)len + 5);
    out[out_len + 4] = kind;
    sk_put32(out + out_len + 5, serial);
    if (len != 0)
        memcpy(out + out_len + HEADER, payload, len);
    out_len += HEADER + len;
    return flush();
}

/* ---- the connection ---- */

static void disconnect(void)
{
    if (connection >= 0)
        close(connection);
    connection = -1;
    inward_len = inward_sent = 0;
}

void sk_wire_connect(int fd, uint32_t serial)
{
    disconnect();
    connection = fd;
    current = serial;
}

static void flush_inward(void)
{
    while (inward_sent < inward_len) {
        ssize_t n = send(connection, inward + inward_sent, inward_len - inward_sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return;
        /* It reads no more. What it said before it went is still to be passed on. */
        inward_sent = n < 0 ? inward_len : inward_sent + (size_t)n;
    }
    inward_len = inward_sent = 0;
}

static bool pass_outward(const struct sk_wire_side *side)
{
    static uint8_t data[WIRE_MAX];
    ssize_t n = recv(connection, data, sizeof data, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return true;
    if (n <= 0) {
        disconnect();
        return sk_wire_send(WIRE_CLOSE, current, NULL, 0);
    }
    if (side->before_data != NULL)
        side->before_data();
    return sk_wire_send(WIRE_DATA, current, data, (size_t)n);
}

bool sk_wire_unread(void)
{
    char byte;
    return connection >= 0 && recv(connection, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
}

/* ---- records ---- */

/* Handles those that are complete, up to one whose data the connection does not take. False: they are malformed. */
static bool take_records(const struct sk_wire_side *side)
{
    size_t at = 0;
    bool fine = true;
    while (fine && inward_len == 0 && in_len - at >= HEADER) {
        size_t len = sk_get32(in + at);
        if (len < 5 || len > WIRE_MAX + 5)
            return false;
        if (in_len - at < len + 4)
            break;
        uint8_t kind = in[at + 4];
        uint32_t serial = sk_get32(in + at + 5);
        const uint8_t *payload = in + at + HEADER;
        len -= 5;
        at += HEADER + len;
        if (kind != WIRE_DATA && kind != WIRE_CLOSE) {
            fine = side->record(kind, serial, payload, len);
        } else if (connection >= 0 && serial == current) {
            if (kind == WIRE_CLOSE) {
                disconnect();
            } else {
                memcpy(inward, payload, len);
                inward_len = len;
                flush_inward();
            }
        }
    }
    memmove(in, in + at, in_len - at);
    in_len -= at;
    return fine;
}

static bool receive(void)
{
    ssize_t n = read(wire, in + in_len, sizeof in - in_len);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return true;
    if (n <= 0)
        return false;
    in_len += (size_t)n;
    return true;
}

static struct pollfd interest(int fd, bool read_it, bool write_it)
{
    short events = (short)((read_it ? POLLIN : 0) | (write_it ? POLLOUT : 0));
    /* An end that is of no interest now would be reported all the same, again and again. */
    return (struct pollfd){ .fd = events == 0 ? -1 : fd, .events = events };
}

void sk_wire_run(const struct sk_wire_side *side)
{
    fcntl(wire, F_SETFL, fcntl(wire, F_GETFL) | O_NONBLOCK);
    for (;;) {
        if (inward_len == 0 && !take_records(side))
            return;
        struct pollfd fds[2 + WIRE_OTHERS] = {
            interest(wire, inward_len == 0, out_len != 0),
            interest(connection, out_len == 0, inward_len != 0),
        };
        for (int i = 0; i < WIRE_OTHERS; i++)
            fds[2 + i] = interest(*side->other[i].fd, out_len < sizeof out - SMALL / 2 &&
                                  !(side->other[i].last && sk_wire_unread()), false);
        if (poll(fds, sizeof fds / sizeof fds[0], -1) < 0) {
            if (errno == EINTR)
                continue;
            return;
        }
        /* First, so that what they tell comes before data that follows from it. */
        for (int i = 0; i < WIRE_OTHERS; i++)
            if (fds[2 + i].revents != 0 && !side->other[i].ready())
                return;
        if (fds[0].revents & POLLOUT && !flush())
            return;
        if (fds[0].revents & ~POLLOUT && inward_len == 0 && !receive())
            return;
        if (connection < 0 || connection != fds[1].fd)
            continue;
        if (fds[1].revents & ~POLLIN && inward_len != 0)
            flush_inward();
        if (fds[1].revents & ~POLLOUT && out_len == 0 && !pass_outward(side))
            return;
    }
}

void sk_wire_flush(void)
{
    fcntl(wire, F_SETFL, fcntl(wire, F_GETFL) & ~O_NONBLOCK);
    (void)flush();
}

size_t sk_wire_await(uint8_t kind, const uint8_t **payload)
{
    while (in_len < HEADER || in_len < sk_get32(in) + 4) {
        ssize_t n = read(wire, in + in_len, sizeof in - in_len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            sk_fail("wire", "read");
        in_len += (size_t)n;
        if (in_len >= 4 && (sk_get32(in) < 5 || sk_get32(in) > WIRE_MAX + 5))
            break;
    }
    errno = EPROTO;
    size_t len = sk_get32(in) + 4;
    if (in_len != len || in[4] != kind) /* nothing else is sent before this is answered */
        sk_fail("wire", "record");
    in_len = 0;
    *payload = in + HEADER;
    return len - HEADER;
}
