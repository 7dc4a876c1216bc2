/* Role guest: the event loop and the one connection to the host.
 *
 * Everything that owns a descriptor is a struct sk_source, registered with epoll. The host speaks first (HELLO);
 * a new connection replaces the old one. What cannot be sent at once waits in one buffer; while it is long,
 * nothing more is read from the processes, so that a slow host stops them instead of filling our memory. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "skerry.h"

#define QUEUE_HIGH (256 * 1024)
#define QUEUE_MAX (8 * 1024 * 1024) /* replies pile up only if the host asks and never reads: cut it off */
#define TICK_NS (4 * 1000 * 1000)
#define PACE_NS (5 * 1000 * 1000)

struct sk_guest_config sk_config;
int sk_filters_fd = -1;
struct sk_roots sk_roots;

static int epoll_fd;
static struct sk_source listener, host = { .fd = -1 }, children, ticker, pacer;
static bool greeted, running = true;
static uint64_t alone_since;

static uint8_t inbox[SK_HEADER + SK_PAYLOAD_MAX];
static size_t inbox_len;
static uint8_t *queue;
static size_t queue_len, queue_sent, queue_size;

/* ---- sources ---- */

void sk_watch(struct sk_source *source, uint32_t events)
{
    struct epoll_event event = { .events = events, .data.ptr = source };
    if (source->fd < 0 || source->armed == events)
        return;
    if (events == 0)
        epoll_ctl(epoll_fd, EPOLL_CTL_DEL, source->fd, NULL);
    else
        epoll_ctl(epoll_fd, source->armed ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, source->fd, &event);
    source->armed = events;
}

void sk_unwatch(struct sk_source *source)
{
    if (source->fd < 0)
        return;
    sk_watch(source, 0);
    close(source->fd);
    source->fd = -1;
}

uint64_t sk_now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

void sk_tick(bool on)
{
    struct itimerspec spec = { { 0, on ? TICK_NS : 0 }, { 0, on ? TICK_NS : 0 } };
    timerfd_settime(ticker.fd, 0, &spec, NULL);
}

void sk_pace(void)
{
    struct itimerspec spec = { .it_value = { 0, PACE_NS } };
    timerfd_settime(pacer.fd, 0, &spec, NULL);
}

/* ---- the connection ---- */

static void disconnect(void)
{
    if (host.fd < 0)
        return;
    sk_unwatch(&host);
    inbox_len = queue_len = queue_sent = queue_size = 0;
    free(queue);
    queue = NULL;
    greeted = false;
    alone_since = sk_now_ms();
    sk_process_disconnected();
    sk_file_disconnected();
}

bool sk_connected(void)
{
    return greeted;
}

bool sk_congested(void)
{
    return queue_len - queue_sent > QUEUE_HIGH;
}

static void flush(void)
{
    bool congested = sk_congested();
    while (queue_sent < queue_len) {
        ssize_t n = send(host.fd, queue + queue_sent, queue_len - queue_sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            break;
        /* A host that is gone reads no answers. What it said before it went is still to be read: see host_ready(). */
        queue_sent = n < 0 ? queue_len : queue_sent + (size_t)n;
    }
    if (queue_sent == queue_len) {
        queue_sent = queue_len = queue_size = 0;
        free(queue); /* an idle guest holds no buffers */
        queue = NULL;
    }
    sk_watch(&host, queue_len ? EPOLLIN | EPOLLOUT : EPOLLIN);
    if (congested && !sk_congested())
        sk_process_rearm();
}

static bool enqueue(const void *data, size_t len)
{
    if (queue_len + len > queue_size) {
        if (queue_sent > 0) {
            memmove(queue, queue + queue_sent, queue_len - queue_sent);
            queue_len -= queue_sent;
            queue_sent = 0;
        }
        size_t size = queue_len + len + SK_CHUNK;
        uint8_t *bigger = size > QUEUE_MAX ? NULL : realloc(queue, size);
        if (bigger == NULL)
            return false;
        queue = bigger;
        queue_size = size;
    }
    memcpy(queue + queue_len, data, len);
    queue_len += len;
    return true;
}

/* With a descriptor, if `fd` is one. It goes with the first byte or, when there is a queue, not at all. */
static void send_with(uint8_t type, uint32_t id, const void *payload, size_t len, int fd)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof fd)];
    } ancillary = { .header = { .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd) } };
    uint8_t header[SK_HEADER];
    if (host.fd < 0)
        return;
    sk_put32(header, (uint32_t)len + 5);
    header[4] = type;
    sk_put32(header + 5, id);
    size_t sent = 0;
    if (queue_len == 0) {
        struct iovec parts[2] = { { header, sizeof header }, { (void *)(uintptr_t)payload, len } };
        struct msghdr message = { .msg_iov = parts, .msg_iovlen = len ? 2 : 1 };
        if (fd >= 0) {
            memcpy(CMSG_DATA(&ancillary.header), &fd, sizeof fd);
            message.msg_control = &ancillary;
            message.msg_controllen = sizeof ancillary;
        }
        ssize_t n = sendmsg(host.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno != EAGAIN && errno != EINTR) {
            /* The loop notices the dead connection; callers may be in the middle of something. */
            return;
        }
        sent = n > 0 ? (size_t)n : 0;
    }
    bool fits = true;
    if (sent < sizeof header) {
        fits = enqueue(header + sent, sizeof header - sent);
        sent = sizeof header;
    }
    sent -= sizeof header;
    if (fits && sent < len)
        fits = enqueue((const uint8_t *)payload + sent, len - sent);
    if (!fits)
        shutdown(host.fd, SHUT_RDWR); /* the loop sees the end of the stream */
    else if (queue_len)
        sk_watch(&host, EPOLLIN | EPOLLOUT);
}

void sk_send(uint8_t type, uint32_t id, const void *payload, size_t len)
{
    send_with(type, id, payload, len, -1);
}

void sk_send_error(uint32_t id, int error, const char *text)
{
    uint8_t payload[516];
    size_t len = strlen(text);
    if (len > 512)
        len = 512;
    sk_put32(payload, (uint32_t)error);
    memcpy(payload + 4, text, len);
    sk_send(SK_ERROR, id, payload, 4 + len);
}

/* ---- requests ---- */

/* For a daemon that did not start this guest, and may not look into it. */
static void hand_over_network(uint32_t id)
{
    int fd = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        sk_send_error(id, errno, "network namespace");
        return;
    }
    send_with(SK_RESULT, id, NULL, 0, fd);
    close(fd);
}

static void dispatch(uint8_t type, uint32_t id, uint8_t *p, size_t len)
{
    if (!greeted) { /* nothing is said before HELLO with our version */
        if (type != SK_HELLO || len != 4 || sk_get32(p) != SK_PROTOCOL_VERSION) {
            shutdown(host.fd, SHUT_RDWR);
            return;
        }
        uint8_t version[4];
        greeted = true;
        sk_put32(version, SK_PROTOCOL_VERSION);
        sk_send(SK_HELLO_REPLY, id, version, sizeof version);
        return;
    }
    switch (type) {
    case SK_START:
        sk_process_start(id, p, len);
        return;
    case SK_STDIN:
        sk_process_stdin(id, p, len);
        return;
    case SK_KILL:
        sk_process_kill(id);
        return;
    case SK_LIST:
        sk_process_list(id);
        return;
    case SK_FORGET:
        sk_process_forget(id);
        return;
    case SK_PING:
        sk_send(SK_PONG, id, p, len);
        return;
    case SK_SHUTDOWN:
        running = false;
        return;
    case SK_STAY:
        if (len == 8)
            sk_config.orphan_ms = sk_get64(p);
        return;
    case SK_NETWORK:
        hand_over_network(id);
        return;
    case SK_CREDIT:
        if (len == 5)
            sk_process_credit(id, p[0], sk_get32(p + 1));
        return;
    case SK_SIGNAL:
        if (len == 4)
            sk_process_signal(id, (int)sk_get32(p));
        return;
    case SK_RESIZE:
        if (len == 4)
            sk_process_resize(id, sk_get16(p), sk_get16(p + 2));
        return;
    case SK_ATTACH:
        if (len == 4)
            sk_process_attach(id, sk_get32(p));
        return;
    default:
        if (type >= SK_FILE_READ && type <= SK_FILE_REMOVE)
            sk_file_request(type, id, p, len);
        else
            sk_send_error(id, ENOSYS, "unknown request");
    }
}

static void host_ready(struct sk_source *source, uint32_t events)
{
    if (events & EPOLLOUT)
        flush();
    if (host.fd < 0 || !(events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        return;
    ssize_t n = recv(source->fd, inbox + inbox_len, sizeof inbox - inbox_len, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        disconnect();
        return;
    }
    inbox_len += (size_t)n;
    size_t at = 0;
    while (inbox_len - at >= SK_HEADER) {
        size_t len = sk_get32(inbox + at);
        if (len < 5 || len > SK_PAYLOAD_MAX + 5) {
            disconnect();
            return;
        }
        if (inbox_len - at < len + 4)
            break;
        dispatch(inbox[at + 4], sk_get32(inbox + at + 5), inbox + at + SK_HEADER, len - 5);
        if (host.fd < 0)
            return;
        at += len + 4;
    }
    memmove(inbox, inbox + at, inbox_len - at);
    inbox_len -= at;
}

/* Where the workload could reach the socket and has our user, that user is nobody to talk to. */
static bool from_stranger(int fd)
{
    struct ucred peer;
    socklen_t len = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) == 0 && peer.uid != geteuid();
}

static void listener_ready(struct sk_source *source, uint32_t events)
{
    (void)events;
    int fd = accept4(source->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0)
        return;
    if (sk_config.strangers_only && !from_stranger(fd)) {
        close(fd);
        return;
    }
    disconnect();
    host = (struct sk_source){ .fd = fd, .ready = host_ready };
    sk_watch(&host, EPOLLIN);
}

static void children_ready(struct sk_source *source, uint32_t events)
{
    struct signalfd_siginfo info;
    (void)events;
    while (read(source->fd, &info, sizeof info) == sizeof info)
        ;
    sk_process_reap();
}

static void ticker_ready(struct sk_source *source, uint32_t events)
{
    uint64_t count;
    (void)events;
    if (read(source->fd, &count, sizeof count) == sizeof count)
        sk_process_tick();
}

static void pacer_ready(struct sk_source *source, uint32_t events)
{
    uint64_t count;
    (void)events;
    if (read(source->fd, &count, sizeof count) == sizeof count)
        sk_process_rearm();
}

/* How long to wait for something to happen; 0: too long without a host, which will not come back. */
static int patience_ms(void)
{
    if (host.fd >= 0 || sk_config.orphan_ms == 0)
        return -1;
    uint64_t alone = sk_now_ms() - alone_since;
    if (alone >= sk_config.orphan_ms)
        return 0;
    uint64_t left = sk_config.orphan_ms - alone;
    return left > INT_MAX ? INT_MAX : (int)left;
}

int sk_guest_main(void)
{
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGCHLD);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    signal(SIGPIPE, SIG_IGN);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    listener = (struct sk_source){ .fd = sk_config.listen_fd, .ready = listener_ready };
    children = (struct sk_source){ .fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK), .ready = children_ready };
    ticker = (struct sk_source){ .fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK), .ready = ticker_ready };
    pacer = (struct sk_source){ .fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK), .ready = pacer_ready };
    if (epoll_fd < 0 || children.fd < 0 || ticker.fd < 0 || pacer.fd < 0 || fcntl(listener.fd, F_SETFL, O_NONBLOCK) < 0)
        return 1;
    sk_watch(&listener, EPOLLIN);
    sk_watch(&children, EPOLLIN);
    sk_watch(&ticker, EPOLLIN);
    sk_watch(&pacer, EPOLLIN);
    if (sk_filters_fd >= 0)
        sk_profile_serve(sk_filters_fd);
    alone_since = sk_now_ms();
    while (running) {
        struct epoll_event event; /* one at a time: handling one may free the owner of another */
        int patience = patience_ms();
        int n = patience == 0 ? -1 : epoll_wait(epoll_fd, &event, 1, patience);
        if (patience == 0)
            return 0;
        if (n < 0 && errno != EINTR)
            return 1;
        if (n == 1) {
            struct sk_source *source = event.data.ptr;
            source->ready(source, event.events);
        }
    }
    return 0;
}
