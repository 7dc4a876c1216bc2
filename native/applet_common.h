/* What the applets share: errors, output, and the walk through a hostile tree. See applets.c. */
#ifndef SKERRY_APPLET_COMMON_H
#define SKERRY_APPLET_COMMON_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "applets.h"

struct applet_target {
    int root_fd;
    char rel[PATH_MAX];    /* below the root; "." is the root itself */
    const char *root_name; /* the last component of the root's own path */
};

/* applets.c. `applet_partial` is set by complain: the applet goes on, and ends with SK_APPLET_PARTIAL. */
extern bool applet_partial;
void applet_complain(int error, const char *what);
_Noreturn void applet_fail(int error, const char *what);
_Noreturn void applet_bad(const char *what); /* an archive that makes no sense */
void applet_remark(int error, const char *what);
extern void (*applet_on_remark)(int error, const char *what); /* NULL, or told of every remark and complaint */

void applet_put(const void *data, size_t len); /* buffered; fails the applet when stdout does */
void applet_flush(void);

/* applet_walk.c: a depth-first walk that holds few descriptors at any depth. */
struct walk_level;
struct walk {
    struct walk_level *levels;
    size_t depth, room;
    int dir_fd;       /* of the directory that holds the entry */
    const char *name; /* of the entry in it */
    char path[SK_NAME_LIMIT + 1];
    bool fits; /* false: longer than SK_NAME_LIMIT; `path` is its directory's, enter gives -ENAMETOOLONG */
};
enum walk_event { WALK_DONE, WALK_ENTRY, WALK_LEFT };

/* Walks the directory `fd`, which it takes over; paths begin with `prefix`. */
void walk_start(struct walk *w, int fd, const char *prefix);
/* WALK_ENTRY: something in a directory; WALK_LEFT: a directory that was entered is behind us. */
enum walk_event walk_next(struct walk *w);
/* Goes into the current entry; with `force`, makes a directory of our own accessible first. */
int walk_enter(struct walk *w, bool force);
/* What an entry gives that was removed, or swapped for something else, since it was seen. */
bool walk_vanished(int error);
/* The same opening, for the top of a tree. */
int walk_open(int dir_fd, const char *name, bool force);

/* The other applets, each in a file of its own. */
void applet_tar(const struct applet_target *target, bool contents);
void applet_untar(const struct applet_target *target, bool unused);
void applet_watch(const struct applet_target *target, bool recursive);

#endif
