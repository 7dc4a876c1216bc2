/* Integers and fields of the guest protocol. */
#include "skerry.h"

uint16_t sk_get16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

uint32_t sk_get32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

uint64_t sk_get64(const uint8_t *p)
{
    return sk_get32(p) | (uint64_t)sk_get32(p + 4) << 32;
}

uint8_t *sk_put32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        *p++ = (uint8_t)(v >> (8 * i));
    return p;
}

uint8_t *sk_put64(uint8_t *p, uint64_t v)
{
    return sk_put32(sk_put32(p, (uint32_t)v), (uint32_t)(v >> 32));
}

bool sk_next_field(struct sk_reader *reader, struct sk_field *field)
{
    if (reader->left < 5)
        return false;
    size_t len = sk_get32(reader->data + 1);
    if (len > reader->left - 5)
        return false;
    field->tag = reader->data[0];
    field->data = reader->data + 5;
    field->len = len;
    reader->data += 5 + len;
    reader->left -= 5 + len;
    return true;
}
