/* Role network: prepares, from outside, the network of an environment that runs.
 *
 * Descriptor 0 is a socket to the daemon (SOCK_SEQPACKET). Each message is a request, and has one answer: a u32 errno,
 * 0 when it was done. All numbers are little endian.
 *
 *   'e' u32 FLAGS, with a namespace      enter it
 *   'n' u32 PROTOCOL, messages         send them to netlink, each of which asks for an acknowledgement
 *   's' u32 TYPE, a socket address     a socket of this type that is bound there, and listens if it can; it comes with
 *                                      the answer
 *   't' u32 TYPE, a socket address     the same, for packets to any address (IP_TRANSPARENT); datagrams come with theirs
 *   'd' u32 INDEX, NAME                a tap device with this index and name, which lasts as long as the descriptor that
 *                                      comes with the answer
 *
 * It ends when the daemon has nothing more to say. What is done, and why, is the daemon's: there is no policy here.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "kernel.h"
#include "skerry.h"

enum { REQUEST_MAX = 64 * 1024, BACKLOG = 1024, PATIENCE = 5 };

/* From linux/netlink.h, which musl has not. */
enum { NETLINK_ERROR = 2, NETLINK_ACK = 4 };

struct netlink_address {
    uint16_t family, padding;
    uint32_t port, groups;
};

struct netlink_header {
    uint32_t len;
    uint16_t type, flags;
    uint32_t sequence, port;
};

static char request[REQUEST_MAX] __attribute__((aligned(8)));

static int enter(int namespace, uint32_t flags)
{
    return setns(namespace, (int)flags) < 0 ? errno : 0;
}

/* Whether there is a whole message at this place, and how far it is to the next. */
static bool next_message(const char *data, size_t left, struct netlink_header *header, size_t *step)
{
    if (left < sizeof *header)
        return false;
    memcpy(header, data, sizeof *header);
    if (header->len < sizeof *header || header->len > left)
        return false;
    *step = (header->len + 3u) & ~3u;
    *step = *step > left ? left : *step;
    return true;
}

/* Every message that asks for it is answered; the first failure counts. */
static int tell_netlink(uint32_t protocol, const char *messages, size_t len)
{
    struct netlink_address kernel = { .family = AF_NETLINK };
    struct timeval patience = { .tv_sec = PATIENCE };
    struct netlink_header header;
    static char answer[16384];
    int expected = 0, failure = 0;
    size_t step;
    for (size_t at = 0; at < len; at += step) {
        if (!next_message(messages + at, len - at, &header, &step))
            return EINVAL;
        expected += (header.flags & NETLINK_ACK) != 0;
    }
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, (int)protocol);
    if (fd < 0)
        return errno;
    if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience) < 0 ||
        sendto(fd, messages, len, 0, (const struct sockaddr *)&kernel, sizeof kernel) < 0)
        failure = errno;
    while (expected > 0 && failure == 0) {
        ssize_t n = recv(fd, answer, sizeof answer, 0);
        if (n <= 0) {
            failure = n < 0 ? errno : EPIPE;
            break;
        }
        for (size_t at = 0; next_message(answer + at, (size_t)n - at, &header, &step); at += step) {
            int32_t code;
            if (header.type != NETLINK_ERROR || header.len < sizeof header + sizeof code)
                continue;
            memcpy(&code, answer + at + sizeof header, sizeof code);
            failure = failure ? failure : -code;
            expected--;
        }
    }
    close(fd);
    return failure;
}

static bool set(int fd, int level, int option)
{
    const int on = 1;
    return setsockopt(fd, level, option, &on, sizeof on) == 0;
}

static bool accept_any_address(int fd, bool six, bool datagrams)
{
    if (six)
        return set(fd, IPPROTO_IPV6, IPV6_TRANSPARENT) && (!datagrams || set(fd, IPPROTO_IPV6, IPV6_RECVPKTINFO));
    return set(fd, IPPROTO_IP, IP_TRANSPARENT) && (!datagrams || set(fd, IPPROTO_IP, IP_PKTINFO));
}

static int open_socket(uint32_t type, const struct sockaddr *address, socklen_t len, bool any_address, int *made)
{
    int fd = socket(address->sa_family, (int)type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return errno;
    bool six = address->sa_family == AF_INET6;
    if ((six && !set(fd, IPPROTO_IPV6, IPV6_V6ONLY)) || (type == SOCK_STREAM && !set(fd, SOL_SOCKET, SO_REUSEADDR)) ||
        (any_address && !accept_any_address(fd, six, type == SOCK_DGRAM)) ||
        bind(fd, address, len) < 0 || (type == SOCK_STREAM && listen(fd, BACKLOG) < 0)) {
        int failure = errno;
        close(fd);
        return failure;
    }
    *made = fd;
    return 0;
}

static int open_tap(uint32_t index, const char *name, size_t len, int *made)
{
    struct ifreq device = { .ifr_flags = TUN_TAP | TUN_NO_HEADER };
    if (len == 0 || len >= sizeof device.ifr_name)
        return EINVAL;
    memcpy(device.ifr_name, name, len);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return errno;
    if (ioctl(fd, TUN_SET_INDEX, &index) < 0 || ioctl(fd, TUN_SET_DEVICE, &device) < 0) {
        int failure = errno;
        close(fd);
        return failure;
    }
    *made = fd;
    return 0;
}

static int serve(size_t len, int given, int *made)
{
    uint32_t number;
    if (len < 1 + sizeof number)
        return EINVAL;
    memcpy(&number, request + 1, sizeof number);
    char *rest = request + 1 + sizeof number;
    size_t left = len - 1 - sizeof number;
    switch (request[0]) {
    case 'e':
        return given < 0 ? EBADF : enter(given, number);
    case 'n':
        return tell_netlink(number, rest, left);
    case 'd':
        return open_tap(number, rest, left, made);
    case 's':
    case 't': {
        struct sockaddr_storage address = { 0 };
        if (left < sizeof address.ss_family || left > sizeof address)
            return EINVAL;
        memcpy(&address, rest, left);
        return open_socket(number, (struct sockaddr *)&address, (socklen_t)left, *request == 't', made);
    }
    default:
        return EINVAL;
    }
}

int sk_network_main(void)
{
    for (;;) {
        union {
            struct cmsghdr header;
            char space[CMSG_SPACE(sizeof(int))];
        } ancillary = { 0 };
        struct iovec data = { .iov_base = request, .iov_len = sizeof request };
        struct msghdr message = {
            .msg_iov = &data, .msg_iovlen = 1, .msg_control = &ancillary, .msg_controllen = sizeof ancillary
        };
        int given = -1, made = -1;
        ssize_t n = recvmsg(0, &message, MSG_CMSG_CLOEXEC);
        if (n <= 0)
            return n < 0;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        if (header != NULL && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof given))
            memcpy(&given, CMSG_DATA(header), sizeof given);
        uint32_t failure = (uint32_t)serve((size_t)n, given, &made);
        data = (struct iovec){ .iov_base = &failure, .iov_len = sizeof failure };
        message = (struct msghdr){ .msg_iov = &data, .msg_iovlen = 1 };
        if (made >= 0) {
            message.msg_control = &ancillary;
            message.msg_controllen = sizeof ancillary;
            header = CMSG_FIRSTHDR(&message);
            *header = (struct cmsghdr){
                .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof made)
            };
            memcpy(CMSG_DATA(header), &made, sizeof made);
        }
        if (sendmsg(0, &message, MSG_NOSIGNAL) < 0)
            return 1;
        close(given);
        close(made);
    }
}
