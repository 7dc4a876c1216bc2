/* File operations that run as programs of their own: see applets.c. */
#ifndef SKERRY_APPLETS_H
#define SKERRY_APPLETS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#include "paths.h"

/* Exit statuses. Every error is a line "errno=N text: what" on stderr, with odd bytes escaped. Entries that
 * are left out get a line each, within 5 KiB in all; an error that ends the applet is its last line. */
enum {
    SK_APPLET_OK = 0,
    SK_APPLET_PARTIAL = 1, /* some entries were left out */
    SK_APPLET_BAD = 2,     /* the arguments or the archive make no sense */
    SK_APPLET_FAILED = 3,  /* the operation could not begin, or not go on */
};

/* Runs an applet in a process of its own, on stdin, stdout and stderr; it may _exit instead of returning.
 * `argv` holds the arguments after the name, the path first. Returns an exit status.
 *
 *   list PATH [-r]            records, each a u32 length and what sk_stat_record makes
 *   remove PATH [-r]          with -r a whole tree; of a root, what is in it
 *   tar PATH [--contents]     an archive of PATH by its last name, or of what is in it
 *   untar PATH                extracts an archive into the directory PATH, made if missing
 *   watch PATH [-r]           records: u32 length, u8 kind, u32 cookie, u16 name length, name
 */
int applet_run(const char *name, int argc, char **argv, const struct sk_roots *roots);

/* Writes: u8 type (f d l p s c b), u32 mode (07777), u32 uid, u32 gid, u64 size, i64 mtime in ns,
 * u16 name length, name, u16 target length, target; packed, little-endian. Returns the size, at most
 * SK_STAT_RECORD_MAX with a name of SK_NAME_LIMIT and a target below PATH_MAX. */
#define SK_NAME_LIMIT 65535
#define SK_STAT_RECORD_MAX (33 + SK_NAME_LIMIT + 4096)
size_t sk_stat_record(uint8_t *out, const struct stat *st, const char *name, size_t name_len,
                      const char *target, size_t target_len);

#endif
