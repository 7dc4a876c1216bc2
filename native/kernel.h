/* Facts of the kernel's interface that the headers of a C library may lack or spell differently.
 * System call numbers from 424 on are the same on every architecture. */
#ifndef SKERRY_KERNEL_H
#define SKERRY_KERNEL_H

#include <netinet/in.h>
#include <stdint.h>

enum {
    NR_OPEN_TREE = 428,
    NR_MOVE_MOUNT,
    NR_FSOPEN,
    NR_FSCONFIG,
    NR_FSMOUNT,
    NR_PIDFD_OPEN = 434,
    NR_CLONE3,
    NR_CLOSE_RANGE,
    NR_OPENAT2,
    NR_MOUNT_SETATTR = 442,
    NR_LANDLOCK_CREATE = 444,
    NR_LANDLOCK_ADD,
    NR_LANDLOCK_RESTRICT,
};

/* close_range: gVisor takes the last descriptor for a signed number */
#define LAST_FD 0x7fffffffu

/* mounts */
#define TREE_CLONE 1u
#define TREE_CLOEXEC (unsigned)O_CLOEXEC
#define TREE_RECURSIVE 0x8000u
#define MOVE_F_EMPTY 0x4u
#define MOVE_T_EMPTY 0x40u
#define ATTR_RDONLY 0x1u
#define ATTR_NOSUID 0x2u
#define ATTR_NODEV 0x4u
#define ATTR_NOEXEC 0x8u
#define ATTR_IDMAP 0x100000u
enum { CONF_FLAG = 0, CONF_STRING = 1, CONF_CREATE = 6 };

struct mount_attributes {
    uint64_t set, clear, propagation, userns;
};

/* openat2 */
#define RESOLVE_MAGICLINKS_NOT 0x02u
#define RESOLVE_SYMLINKS_NOT 0x04u
#define RESOLVE_AS_ROOT 0x10u

struct open_request {
    uint64_t flags, mode, resolve;
};

/* clone3 */
#define INTO_CGROUP 0x200000000ull

struct clone_request {
    uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup;
};

/* capabilities, version 3 */
#define CAPABILITY_VERSION 0x20080522u

struct capability_header {
    uint32_t version;
    int pid;
};

struct capability_data {
    uint32_t effective, permitted, inheritable;
};

/* the random device */
#define RANDOM_ADD 0x40085203u
#define RANDOM_RESEED 0x5207u

/* network devices of programs */
#define TUN_SET_DEVICE 0x400454cau
#define TUN_SET_INDEX 0x400454dau
#define TUN_TAP 0x0002
#define TUN_NO_HEADER 0x1000

/* addresses and routes of IPv6, by ioctl */
struct interface_address {
    struct in6_addr address;
    uint32_t prefix;
    int index;
};

struct interface_route {
    struct in6_addr to, from, gateway;
    uint32_t type;
    uint16_t to_prefix, from_prefix;
    uint32_t metric;
    unsigned long info;
    uint32_t flags;
    int index;
};

/* PR_SET_SECUREBITS: no root, no setuid fixup, no ambient raise, each locked, and keep_caps locked at off */
#define SECUREBITS_NOTHING 0xefu
#define SECUREBIT_NO_SETUID_FIXUP 4u

/* seccomp */
#define SECCOMP_INSTALL 1u
#define SECCOMP_WITH_LISTENER 8u
#define SECCOMP_CODE_RETURN 0x06
#define SECCOMP_ASK 0x7fc00000u /* the answer is the listener's */
#define SECCOMP_RECEIVE 0xc0502100u
#define SECCOMP_SEND 0xc0182101u
#define SECCOMP_CONTINUE 1u

struct filter_instruction {
    uint16_t code;
    uint8_t jt, jf;
    uint32_t k;
};

struct filter_program {
    unsigned short len;
    struct filter_instruction *filter;
};

struct seccomp_question {
    uint64_t id;
    uint32_t pid, flags;
    uint64_t data[8];
};

struct seccomp_answer {
    uint64_t id;
    int64_t value;
    int32_t error;
    uint32_t flags;
};

/* Landlock */
enum { LANDLOCK_BENEATH = 1 };
#define ACCESS_EXECUTE (1ull << 0)
#define ACCESS_WRITE_FILE (1ull << 1)
#define ACCESS_READ_FILE (1ull << 2)
#define ACCESS_TRUNCATE (1ull << 14)
#define ACCESS_IOCTL_DEV (1ull << 15)
#define LANDLOCK_ASK_VERSION 1u

struct landlock_attributes { /* as of ABI 6; a kernel that knows less takes a shorter one */
    uint64_t fs, net, scoped;
};

struct landlock_rule {
    uint64_t access;
    int32_t parent;
} __attribute__((packed));

#endif
