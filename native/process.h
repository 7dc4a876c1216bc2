/* What executions are made of: shared by process.c, start.c, streams.c and kill.c. */
#ifndef SKERRY_PROCESS_H
#define SKERRY_PROCESS_H

#include "skerry.h"

#define SK_STREAMS 3 /* stdout, stderr, replies */
#define SK_REPLIES 2
#define SK_STDIN_WINDOW 65536

struct sk_stream {
    struct sk_source source;
    struct sk_process *owner;
    uint8_t number; /* 1, 2 or 3, as on the wire */
    uint64_t total; /* bytes that the program wrote and we took */
    uint64_t sent;
    uint64_t target; /* what must have been taken before the end is told */
    uint32_t credit;
    uint8_t *ring;
};

struct sk_process {
    struct sk_process *next;
    uint32_t id;
    pid_t supervisor, pid;
    uint32_t flags;
    uint64_t limit;
    bool attached;  /* the host wants its output */
    bool exited;    /* the main program has ended */
    bool told;      /* ... and the host knows */
    bool killing;
    bool begins;    /* with a profile, and its program has not started yet */
    uint64_t since;        /* of the kill, or of the end */
    uint64_t idle_since;   /* of a kill: who is to report its end has not been seen to wait for a CPU since then */
    struct sk_chase chase; /* of a kill */
    bool outruns;          /* ... so far */
    int code, signo;
    struct rusage usage;
    struct sk_stream out[SK_STREAMS];
    struct sk_source in, report;
    uint8_t *pending; /* input that the program has not taken yet */
    size_t pending_len;
    bool input_ended, input_held;
    char name[32];
};

extern struct sk_process *sk_processes;

/* ---- process.c ---- */

struct sk_process *sk_process_find(uint32_t id); /* NULL if there is none */
void sk_process_advance(struct sk_process *p);   /* when its streams or its end may have changed; may free it */
bool sk_process_begins(pid_t pid);               /* is it about to become a command with a profile? */

/* ---- streams.c ---- */

void sk_output_ready(struct sk_source *source, uint32_t events);
void sk_input_ready(struct sk_source *source, uint32_t events);
/* Takes up to one chunk from the program; false when there is nothing to take or nobody may take it now. */
bool sk_stream_take(struct sk_stream *s);
uint64_t sk_stream_kept_from(const struct sk_stream *s);             /* where in the stream the kept output begins */
void sk_stream_replay(struct sk_stream *s);                          /* sends the kept output again */
void sk_stream_rearm(struct sk_process *p);                          /* its output may be taken again */
void sk_input_grant(struct sk_process *p, size_t bytes);

/* ---- kill.c ---- */

size_t sk_kill_count(struct sk_process *p); /* living processes of the execution */
void sk_kill_strays(void); /* orphans, which exist only if a supervisor was killed from inside */

#endif
