/* Short file operations, and files that stay open from frame to frame: files.c, handles.c. */
#ifndef SKERRY_FILES_H
#define SKERRY_FILES_H

#include "skerry.h"

struct sk_request { /* decoded; pointers lead into the frame */
    const uint8_t *path, *path2, *data;
    size_t path_len, path2_len, data_len;
    uint64_t offset;
    uint32_t length, flags, handle;
};

/* All of these return -errno for a failure. A `rel` is what sk_path_split() made of the request's path. */

int sk_open_in_place(int root, const char *rel); /* to write; made if missing */

/* A piece of content with a handle. SK_FLAG_TRUNCATE begins new content, SK_FLAG_KEEP begins to write in place. */
int sk_handle_write(int root, const char *rel, const struct sk_request *r);
int sk_handle_write_at(int fd, const struct sk_request *r);
int sk_handle_keep(uint32_t handle, int fd); /* takes the descriptor, and closes it if it fails */
int sk_handle_fd(uint32_t handle);           /* -EBADF: there is no such handle */
void sk_handle_drop(uint32_t handle);

#endif
