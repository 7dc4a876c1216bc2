/* Path resolution that never leaves a root directory: see paths.c. */
#ifndef SKERRY_PATHS_H
#define SKERRY_PATHS_H

#include <limits.h>
#include <stddef.h>
#include <sys/types.h>

/* Where a caller's path may lead: O_PATH|O_DIRECTORY descriptors and the absolute paths that name them. */
struct sk_roots {
    int workspace_fd;
    const char *workspace_path;
    int tmp_fd;
    const char *tmp_path;
};

/* All of these return 0 or a descriptor, or -errno. A `rel` is relative, has no ".." and may be longer
 * than PATH_MAX; -EXDEV means that it, or a symlink on its way, leads outside of the root. */

/* Splits a caller's path, absolute or relative to the workspace, into a root and a normalised path below
 * it ("." for the root itself). "." and ".." are resolved by the text alone, so that "a/../b" is "b"
 * whatever "a" is. -EINVAL: empty, with a NUL, or too long. -EXDEV: below neither root. */
int sk_path_split(const struct sk_roots *roots, const char *path, size_t len, int *root_fd,
                  char rel[PATH_MAX]);

/* Opens as openat() does, beneath the root, never blocking on what it finds. Adds O_CLOEXEC, O_NOCTTY and
 * O_NONBLOCK. An absolute symlink counts as leading outside, wherever it points. */
int sk_open(int root_fd, const char *rel, int flags, mode_t mode);

/* openat() of one name, for flags with O_DIRECTORY and O_NOFOLLOW: never what a symlink leads to. -1 and errno. */
int sk_open_directory(int dir_fd, const char *name, int flags);

/* As sk_open, for a regular file alone: -EISDIR for a directory, -ENXIO for anything else. */
int sk_open_regular(int root_fd, const char *rel, int flags, mode_t mode);

/* Opens the directory (O_PATH) that holds the last component of `rel`, and points `name` at that
 * component. -EBUSY for the root, which has no parent. */
int sk_open_parent(int root_fd, const char *rel, const char **name);

/* mkdir -p. A symlink to a directory beneath the root is as good as a directory. */
int sk_mkdirs(int root_fd, const char *rel, mode_t mode);

#endif
