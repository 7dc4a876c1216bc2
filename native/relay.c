/* Role relay: copies between stdin and stdout and the socket of a guest, until either side ends.
 *
 * A daemon that cannot reach the socket itself starts it inside by way of a container engine, as a user that is not the
 * workload's: nothing inside can signal or trace it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "skerry.h"

struct way {
    int from, to;
    size_t start, end; /* what is read and not yet written */
    char data[SK_CHUNK];
};

static struct way ways[2];

/* False at the end of either side. */
static bool move(struct way *way, short from_events, short to_events)
{
    if (way->start == way->end && (from_events & (POLLIN | POLLHUP | POLLERR))) {
        ssize_t n = read(way->from, way->data, sizeof way->data);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
            return false;
        way->start = 0;
        way->end = n < 0 ? 0 : (size_t)n;
        to_events = POLLOUT;
    }
    if (way->start < way->end && (to_events & (POLLOUT | POLLHUP | POLLERR))) {
        ssize_t n = write(way->to, way->data + way->start, way->end - way->start);
        if (n < 0 && errno != EAGAIN && errno != EINTR)
            return false;
        way->start += n < 0 ? 0 : (size_t)n;
    }
    return true;
}

static int copy(int guest)
{
    ways[0].from = STDIN_FILENO, ways[0].to = guest;
    ways[1].from = guest, ways[1].to = STDOUT_FILENO;
    for (;;) {
        bool in = ways[0].start == ways[0].end, out = ways[1].start == ways[1].end;
        struct pollfd polled[3] = {
            { .fd = in ? STDIN_FILENO : -1, .events = POLLIN },
            { .fd = guest, .events = (short)((out ? POLLIN : 0) | (in ? 0 : POLLOUT)) },
            { .fd = out ? -1 : STDOUT_FILENO, .events = POLLOUT },
        };
        if (poll(polled, 3, -1) < 0 && errno != EINTR)
            return 1;
        if (!move(&ways[0], polled[0].revents, polled[1].revents) || !move(&ways[1], polled[1].revents, polled[2].revents))
            return 0;
        if (polled[1].revents & (POLLHUP | POLLERR) && !(polled[1].revents & POLLIN) && out)
            return 0;
    }
}

int sk_relay_main(const char *path)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    if (strlen(path) >= sizeof address.sun_path)
        return 2;
    strcpy(address.sun_path, path);
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_NAME, "skerry-relay", 0, 0, 0);
    int guest = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (guest < 0 || connect(guest, (struct sockaddr *)&address, sizeof address) < 0) {
        perror("relay");
        return 1;
    }
    const int nonblocking[] = { STDIN_FILENO, STDOUT_FILENO, guest };
    for (int i = 0; i < 3; i++)
        fcntl(nonblocking[i], F_SETFL, O_NONBLOCK);
    return copy(guest);
}
