/* Skerry's native helper: shared declarations. The theory of operation is at the top of main.c. */
#ifndef SKERRY_H
#define SKERRY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "paths.h"

#define SK_PROTOCOL_VERSION 1
#define SK_PAYLOAD_MAX (128 * 1024)
#define SK_HEADER 9 /* u32 length of what follows, u8 type, u32 id; all integers are little endian */
#define SK_CHUNK 65536

/* ---- frames: src/skerry/guest/frames.py says the same in Python ---- */

enum {
    /* host to guest */
    SK_HELLO = 1,
    SK_START,
    SK_STDIN,
    SK_CREDIT,
    SK_SIGNAL,
    SK_KILL,
    SK_RESIZE,
    SK_LIST,
    SK_ATTACH,
    SK_FORGET,
    SK_PING,
    SK_SHUTDOWN,
    SK_NETWORK,
    SK_STAY = 14, /* u64: so many milliseconds without a connection to the host, and the guest ends */
    SK_FILE_READ = 20,
    SK_FILE_WRITE,
    SK_FILE_STAT,
    SK_FILE_MKDIR,
    SK_FILE_RENAME,
    SK_FILE_REMOVE,
    /* guest to host */
    SK_HELLO_REPLY = 101,
    SK_STARTED,
    SK_OUTPUT,
    SK_STDIN_CREDIT,
    SK_EXIT,
    SK_PONG,
    SK_RESULT,
    SK_ERROR,
    SK_KILLED,
};

enum { /* fields of a request: u8 tag, u32 length, bytes */
    SK_TAG_ARG = 1,
    SK_TAG_ENV,
    SK_TAG_CWD,
    SK_TAG_USER,
    SK_TAG_FLAGS,
    SK_TAG_WINSIZE,
    SK_TAG_LIMIT,
    SK_TAG_SHELL,
    SK_TAG_COMMAND,
    SK_TAG_APPLET,
    SK_TAG_RLIMIT,
    SK_TAG_CREDIT,
    SK_TAG_PROFILE, /* fields of its own: the next three */
    SK_TAG_FILTER,  /* instructions of a seccomp filter */
    SK_TAG_ACCESS,  /* u64: what Landlock refuses where no rule grants it */
    SK_TAG_RULE,    /* u64: what it grants, and below which path; its last byte is 0 */
    SK_TAG_PATH = 20,
    SK_TAG_PATH2,
    SK_TAG_OFFSET,
    SK_TAG_LENGTH,
    SK_TAG_DATA,
    SK_TAG_HANDLE,
};

enum {
    SK_FLAG_STDIN = 1,
    SK_FLAG_PTY = 2,
    SK_FLAG_KEEP = 4, /* of an execution: its end and its last output; of a file: open, under the handle */
    SK_FLAG_TRUNCATE = 8,
    SK_FLAG_PARENTS = 16,
    SK_FLAG_REPLIES = 32, /* descriptor 9 of the program is a third stream, which comes behind the other two */
    SK_FLAG_COMMIT = 64,  /* the last frame of content with a handle: the file gets its name */
    SK_FLAG_ABORT = 128,  /* the handle is given up */
};

/* ---- proto.c: bytes ---- */

struct sk_reader {
    const uint8_t *data;
    size_t left;
};

struct sk_field {
    uint8_t tag;
    const uint8_t *data;
    size_t len;
};

bool sk_next_field(struct sk_reader *reader, struct sk_field *field); /* false: end, or malformed (left > 0) */
uint16_t sk_get16(const uint8_t *p);
uint32_t sk_get32(const uint8_t *p);
uint64_t sk_get64(const uint8_t *p);
uint8_t *sk_put32(uint8_t *p, uint32_t v);
uint8_t *sk_put64(uint8_t *p, uint64_t v);

/* ---- guest.c: the event loop and the connection to the host ---- */

struct sk_guest_config {
    int listen_fd;
    const char *workspace; /* absolute paths in the guest's own view */
    const char *tmp;
    const char *run; /* private directory for the pipes of shells */
    uid_t uid;
    gid_t gid;
    bool switch_users; /* the user namespace maps more than one user */
    bool gvisor;       /* the kernel inside is gVisor's */
    bool strangers_only; /* refuse connections from processes of our own user */
    rlim_t fds;        /* limits of every workload process; RLIM_INFINITY leaves them alone */
    rlim_t processes;
    rlim_t data;
    rlim_t file_size;
    uint64_t orphan_ms; /* so long without a connection to the host, and the guest ends; 0: never */
};

extern struct sk_guest_config sk_config;
extern struct sk_roots sk_roots;
extern int sk_filters_fd; /* where processes ask whether they may install a seccomp filter; -1: nowhere */

int sk_guest_main(void); /* runs until shutdown; returns an exit status */
bool sk_connected(void);
bool sk_congested(void); /* the host reads too slowly: stop taking output from processes */
void sk_send(uint8_t type, uint32_t id, const void *payload, size_t len);
void sk_send_error(uint32_t id, int error, const char *text);

/* What epoll hands back: the first member of everything that owns a descriptor. */
struct sk_source {
    int fd;
    void (*ready)(struct sk_source *source, uint32_t events);
    uint32_t armed; /* events that epoll waits for; 0: not registered */
};

void sk_watch(struct sk_source *source, uint32_t events);
void sk_unwatch(struct sk_source *source);
void sk_tick(bool on); /* sk_process_tick() every few milliseconds */
void sk_pace(void);    /* sk_process_rearm() a millisecond later */
uint64_t sk_now_ms(void);

/* ---- process.c: executions, their streams and their process trees ---- */

struct sk_start { /* a decoded START; arrays point into the frame */
    char **argv;
    char **envp;
    char *cwd;
    uid_t uid;
    gid_t gid;
    uint32_t flags;
    uint16_t rows, cols;
    uint64_t limit;
    uint32_t credit;
    char *shell;
    const uint8_t *command;
    size_t command_len;
    char *applet;
    const uint8_t *profile; /* fields; NULL: none */
    size_t profile_len;
};

struct sk_process;

void sk_process_start(uint32_t id, const uint8_t *payload, size_t len);
void sk_process_stdin(uint32_t id, const uint8_t *data, size_t len);
void sk_process_credit(uint32_t id, int stream, uint32_t bytes);
void sk_process_signal(uint32_t id, int signo);
void sk_process_kill(uint32_t id);
void sk_process_resize(uint32_t id, uint16_t rows, uint16_t cols);
void sk_process_list(uint32_t request);
void sk_process_attach(uint32_t id, uint32_t credit);
void sk_process_forget(uint32_t id);
void sk_process_disconnected(void); /* the host is gone: drain instead of sending */
void sk_process_rearm(void); /* output of all of them may be taken again */
void sk_process_reap(void); /* after SIGCHLD */
void sk_process_tick(void);

/* For shell.c. */
struct sk_process *sk_process_new(uint32_t id, const struct sk_start *start);
bool sk_process_killing(const struct sk_process *process);
void sk_process_abort(struct sk_process *process, int error, const char *text);
void sk_process_stream(struct sk_process *process, int stream, int fd); /* 0, 1 or 2; takes the descriptor */
void sk_process_hold_input(struct sk_process *process, bool hold); /* while held, its end is not passed on */
void sk_process_started(struct sk_process *process, pid_t pid);
void sk_process_exited(struct sk_process *process, int code, int signo, const struct rusage *usage);
void sk_process_notice(struct sk_process *process, const char *text); /* a line on its stderr */
const char *sk_step_text(int step); /* the host knows these words */
int sk_cap_limit(int resource, rlim_t value); /* soft and hard, never above what they are */
int sk_high(int fd); /* moves a descriptor out of the way of 8 and 9 */
/* extra: descriptors 8 and 9 of the program; -1: none */
pid_t sk_supervise(const struct sk_start *start, const int stdio[3], bool pty, int report_fd, const int extra[2]);

struct sk_report { /* from a supervisor, through a pipe */
    uint32_t kind;
    int32_t value;
    int32_t error;
    uint32_t pad;
    struct rusage usage;
};
enum { SK_REPORT_STARTED = 1, SK_REPORT_FAILED, SK_REPORT_EXITED };
enum { SK_STEP_EXEC = 1, SK_STEP_CWD, SK_STEP_USER, SK_STEP_FORK, SK_STEP_LIMITS, SK_STEP_PROFILE };

/* ---- tree.c: who descends from whom ---- */

#define SK_TREE_MAX 8192

struct sk_tree {
    bool dying; /* children of the root have ended that it has not taken notice of yet */
    size_t count;
    pid_t pids[SK_TREE_MAX];
};

/* All live descendants of `root` (itself not included), less `spare`, and less `survivors` with their descendants.
 * Parents come before their children. */
void sk_tree_read(struct sk_tree *tree, pid_t root, pid_t spare, const struct sk_tree *survivors);
void sk_tree_hold(bool hold); /* one look at all processes now, which holds for every reading until it is let go */
pid_t sk_parent_of(pid_t pid); /* 0 if it is gone or dead */
bool sk_waits_for_machine(pid_t pid); /* for a CPU, or for the disk: it is neither idle nor stopped */

#define SK_CHASE_SCANS 32

struct sk_chase { /* of a tree that is being killed */
    pid_t newest;         /* of the last scan */
    unsigned fresh_scans; /* scans in a row that found a newer process than the one before */
};

/* Notes a complete scan. True if the tree has forked faster than it was killed for more than SK_CHASE_SCANS in a row. */
bool sk_tree_outruns(struct sk_chase *chase, const struct sk_tree *tree);

/* ---- profile.c: execution profiles ---- */

int sk_profile_apply(const struct sk_start *start, bool pty); /* to this process; -1: it must not go on */
void sk_profile_serve(int fd); /* answers those who ask there whether they may install a filter */

/* ---- shell.c: stateful shells ---- */

void sk_shell_start(uint32_t id, const struct sk_start *start);
bool sk_shell_reaped(pid_t pid); /* a supervisor died: was it a shell's? */
bool sk_shell_owns(pid_t pid);   /* is it the supervisor of a shell? */
/* The processes of the command that `process` is in its shell; false if it is not a shell's. */
bool sk_shell_tree(const struct sk_process *process, struct sk_tree *tree);
void sk_shell_listen(const struct sk_process *process); /* has its command ended? Handles what its shell has said */
pid_t sk_shell_pid(const struct sk_process *process); /* the shell that its command returns to; 0: none */
bool sk_shell_break(const struct sk_process *process); /* its shell does not notice its end: false if it has none */
void sk_shell_detach(const struct sk_process *process); /* it is no longer of the shell's concern */

/* ---- files.c, handles.c: file operations that are short enough for the event loop ---- */

void sk_file_request(uint8_t type, uint32_t id, const uint8_t *payload, size_t len);
void sk_file_disconnected(void); /* closes all handles */

/* ---- launch.c ---- */

int sk_launch_main(void);
int sk_init_main(int argc, char **argv); /* the steps of it, after its role */
int sk_boot_main(void);
int sk_network_main(void);
int sk_relay_main(const char *path);

#endif
