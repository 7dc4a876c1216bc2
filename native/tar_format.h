/* The tar header block as POSIX has it, shared by tar_write.c and tar_read.c. */
#ifndef SKERRY_TAR_FORMAT_H
#define SKERRY_TAR_FORMAT_H

#include <stdint.h>

#define TAR_BLOCK 512
#define TAR_SEGMENTS_MAX (1 << 18) /* pieces of one sparse file */

struct tar_segment {
    int64_t offset, size;
};

struct tar_header {
    char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], checksum[8], type, link[100];
    char magic[6], version[2], user[32], group[32], major[8], minor[8], prefix[155], pad[12];
};
_Static_assert(sizeof(struct tar_header) == TAR_BLOCK, "a header is one block");

#endif
